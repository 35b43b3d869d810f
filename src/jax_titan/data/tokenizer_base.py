"""What a tokenizer is: text to token ids and back, without loss.

Every tokenizer knows the UTF-8 bytes behind each token, so a loss in nats a token becomes bits a byte. Text that
spells a special such as "<|end_of_text|>" is ordinary text, unless the caller asks for specials.
"""

import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from jax_titan.data.errors import DataError

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"

_PIECE_CHARACTERS = 1 << 16
_PIECE_END = re.compile(r"\n(?=\S)")


class Tokenizer(ABC):
    """What the rest of the program knows about a tokenizer."""

    kind: ClassVar[str]

    bos: int
    """Id of the token that begins each document."""

    eos: int
    """Id of the token that ends each document."""

    specials: dict[str, int]
    """Ids of the tokens that stand for no text, by what a person writes for them."""

    _token_texts: list[bytes]
    """The bytes of each token by id; none for the specials."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the specials included."""
        return len(self._token_texts)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids at which generation ends: `eos`, and where the tokenizer has them the ends of a message or turn."""
        return frozenset({self.eos})

    @property
    @abstractmethod
    def digest(self) -> str:
        """What this tokenizer does to text, as xxh3_128 in hexadecimal: equal digests give equal ids."""

    @abstractmethod
    def describe(self) -> str:
        """One line for a person."""

    @abstractmethod
    def _encode_ordinary(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode_batch` without specials."""

    @abstractmethod
    def _serialized(self) -> str:
        """What `save` writes and `load` reads."""

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[np.ndarray]:
        """Encode several texts at once, on all cores where the library can.

        Args:
            texts: any valid Unicode.
            specials: whether text that spells a special becomes that special. Never for text that is not yours:
                whoever wrote it could end documents and speak for others.

        Returns:
            int32 ids of each text; no special is added.
        """
        return self._encode_with_specials(texts) if specials else self._encode_ordinary(texts)

    def encode(self, text: str, specials: bool = False) -> np.ndarray:
        """Encode a text; see `encode_batch`.

        Returns:
            int32 ids [tokens]; no special is added.
        """
        return self.encode_batch([text], specials)[0]

    def pieces(self, text: str) -> Iterator[str]:
        """Cut a long text where this tokenizer encodes it as if it were not cut; by default see `pieces`.

        Args:
            text: any text.

        Returns:
            Pieces that joined give the text; one piece where no cut is known to be safe.
        """
        return pieces(text)

    def decode_bytes(self, ids: Iterable[int] | np.ndarray, specials: bool = False) -> bytes:
        """The bytes behind token ids.

        Args:
            ids: token ids.
            specials: whether specials give their spelling; else they give nothing.

        Returns:
            Their bytes joined; any bytes, for ids may stop within a character.

        Raises:
            DataError: an id outside the vocabulary.
        """
        texts = self._spelled_texts if specials else self._token_texts
        return b"".join(texts[i] for i in self._known(ids))

    def decode(self, ids: Iterable[int] | np.ndarray, specials: bool = False) -> str:
        """The text behind token ids; bytes that form no character become U+FFFD. See `decode_bytes`."""
        return self.decode_bytes(ids, specials).decode(errors="replace")

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes behind each token, int32 [vocab_size]; 0 for the specials."""
        lengths = np.array([len(text) for text in self._token_texts], np.int32)
        lengths.flags.writeable = False
        return lengths

    def save(self, path: Path) -> None:
        """Write the tokenizer to a file, whole or not at all.

        Args:
            path: the file; a former one is replaced.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(self._serialized())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @cached_property
    def _spelled_texts(self) -> list[bytes]:
        texts = list(self._token_texts)
        for spelling, i in self.specials.items():
            texts[i] = spelling.encode()
        return texts

    @cached_property
    def _any_special(self) -> re.Pattern[str]:
        longest_first = sorted(self.specials, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def _encode_with_specials(self, texts: Sequence[str]) -> list[np.ndarray]:
        # Ordinary text at even places, the specials between.
        split = [self._any_special.split(text) for text in texts]
        ordinary = iter(self._encode_ordinary([part for parts in split for part in parts[::2]]))
        return [
            np.concatenate(
                [
                    np.array([self.specials[part]], np.int32) if place % 2 else next(ordinary)
                    for place, part in enumerate(parts)
                ]
            )
            for parts in split
        ]

    def _known(self, ids: Iterable[int] | np.ndarray) -> list[int]:
        known = ids.tolist() if isinstance(ids, np.ndarray) else [int(i) for i in ids]
        for i in known:
            if not 0 <= i < self.vocab_size:
                raise DataError(f"token id: {i} is not in this tokenizer's vocabulary of {self.vocab_size}")
        return known


def pieces(text: str, size: int = _PIECE_CHARACTERS, end: re.Pattern[str] = _PIECE_END) -> Iterator[str]:
    """Cut a long text into portions of about one size, so that memory and cores see even ones.

    No word of the split of Llama 3, or of ours, reaches from a line feed to a visible character: text cut there
    encodes as if it were not cut.

    Args:
        text: any text.
        size: characters a piece has at least, but for the last.
        end: where a piece may end.

    Returns:
        Pieces that joined give the text; a text without a place to cut is one piece.
    """
    start = 0
    while found := end.search(text, start + size):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level BPE file, by byte.

    Source: openai/gpt-2, src/encoder.py, `bytes_to_unicode`: bytes that print stand for themselves, the
    others are the characters from U+0100 on.
    """
    printing = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256, 512))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]
