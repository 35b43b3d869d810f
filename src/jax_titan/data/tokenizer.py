"""Tokenizers: text to token ids and back, without loss.

`ByteTokenizer` is 256 bytes and two specials; `BpeTokenizer` is byte-level BPE, trained here or loaded from a
Hugging Face `tokenizer.json`. Both know the UTF-8 bytes behind each token, so a loss in nats a token becomes
bits a byte. A special is only ever put by id: text that spells "<|end_of_text|>" is ordinary text.
"""

import json
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import tokenizers
import xxhash

from jax_titan.data.errors import DataError

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
SMALLEST_VOCAB = 256 + 2
"""Every byte and the two specials: what byte-level BPE needs before its first merge."""

# The split that Llama 3 uses (its reference tokenizer, class Tokenizer, `pat_str`): contractions, words with
# the space before them, numbers by three digits, punctuation, line ends. It cuts every text completely, hence
# loses nothing.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}{1,256}|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]{1,256}[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PIECE_CHARACTERS = 1 << 16
# No match of SPLIT_PATTERN reaches from a line feed to a visible character, so text cut there encodes as if
# uncut.
_PIECE_END = re.compile(r"\n(?=\S)")


class Tokenizer(ABC):
    """What the rest of the program knows about a tokenizer."""

    kind: ClassVar[str]

    bos: int
    """Id of the token that begins each document."""

    eos: int
    """Id of the token that ends each document."""

    _token_texts: list[bytes]
    """The bytes of each token by id; none for the specials."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, both specials included."""
        return len(self._token_texts)

    @property
    @abstractmethod
    def digest(self) -> str:
        """What this tokenizer does to text, as xxh3_128 in hexadecimal: equal digests give equal ids."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode several texts at once, on all cores where the library can.

        Args:
            texts: any valid Unicode.

        Returns:
            int32 ids of each text, without specials.
        """

    @abstractmethod
    def describe(self) -> str:
        """One line for a person."""

    @abstractmethod
    def _serialized(self) -> str:
        """What `save` writes and `load` reads."""

    def encode(self, text: str) -> np.ndarray:
        """Encode a text.

        Args:
            text: any valid Unicode.

        Returns:
            int32 ids [tokens], without specials.
        """
        return self.encode_batch([text])[0]

    def pieces(self, text: str) -> Iterator[str]:
        """Cut a long text where it encodes as if it were not cut; see the function `pieces`."""
        return pieces(text)

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """The bytes behind token ids; the specials have none.

        Args:
            ids: token ids.

        Returns:
            Their bytes joined; any bytes, for ids may stop within a character.

        Raises:
            DataError: an id outside the vocabulary.
        """
        texts = self._token_texts
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < len(texts):
                raise DataError(f"token id: {i} is not in this tokenizer's vocabulary of {len(texts)}")
        return b"".join(texts[i] for i in ids)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text behind token ids; bytes that form no character become U+FFFD. See `decode_bytes`."""
        return self.decode_bytes(ids).decode(errors="replace")

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


class ByteTokenizer(Tokenizer):
    """One token a byte of UTF-8, ids 0 to 255, then the two specials."""

    kind = "bytes"

    def __init__(self) -> None:
        self.bos, self.eos = 256, 257
        self._token_texts = [bytes([byte]) for byte in range(256)] + [b"", b""]

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self._serialized().encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def describe(self) -> str:
        return f"UTF-8 bytes, {self.vocab_size} tokens"

    def _serialized(self) -> str:
        return json.dumps({"kind": self.kind, "version": 1})


class BpeTokenizer(Tokenizer):
    """Byte-level BPE: the split of Llama 3, then merges of bytes; the two specials are the last ids.

    Args:
        library: a Hugging Face tokenizer with a byte-level BPE model, our split, no normalizer, and both
            specials added.

    Raises:
        DataError: it is not such a tokenizer.

    Source: Sennrich et al. 2016, arXiv 1508.07909 (BPE); Radford et al. 2019, section 2.2 (byte level).
    """

    kind = "bpe"

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        content: dict[str, Any] = json.loads(library.to_str())
        if content["model"].get("type") != "BPE" or content["normalizer"] or not _splits_as_ours(content):
            raise DataError(
                "tokenizer: it is not byte-level BPE with our split; train one with data.tokenizer bpe"
            )
        bos, eos = library.token_to_id(BOS), library.token_to_id(EOS)
        specials = set(library.get_added_tokens_decoder())
        if bos not in specials or eos not in specials:
            raise DataError(f"tokenizer: it lacks {BOS} or {EOS}; train one with data.tokenizer bpe")
        # Otherwise the library would turn text that spells a special into the special.
        library.encode_special_tokens = True
        self._library = library
        self._content = content
        self._names = [cast(str, library.id_to_token(i)) for i in range(library.get_vocab_size())]
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        self._token_texts = [
            b"" if i in specials else bytes(byte_of[c] for c in name) for i, name in enumerate(self._names)
        ]
        self.bos, self.eos = cast(int, bos), cast(int, eos)

    @cached_property
    def digest(self) -> str:
        # Of what the ids depend on, not of the library's file format, which may change with its version.
        merges = [" ".join(m) if isinstance(m, list) else m for m in self._content["model"]["merges"]]
        what = [self.kind, 1, SPLIT_PATTERN, self._names, merges]
        return xxhash.xxh3_128_hexdigest(json.dumps(what).encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [
            np.array(encoding.ids, np.int32)
            for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def describe(self) -> str:
        return f"byte-level BPE, {self.vocab_size:,} tokens"

    def _serialized(self) -> str:
        return self._library.to_str()


def train_bpe(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Train byte-level BPE; the same texts give the same tokenizer.

    Args:
        texts: the text to learn from, streamed.
        vocab_size: tokens wanted, the two specials included.

    Returns:
        A tokenizer of `vocab_size` tokens, or of fewer where no pair of tokens is left that occurs twice:
        read the number from its `vocab_size`.

    Raises:
        DataError: `vocab_size` has no room for all bytes and the specials.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise DataError(
            f"data.vocab_size: {vocab_size} is too small for bpe; "
            f"use {SMALLEST_VOCAB} (256 bytes and 2 specials) or more"
        )
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        min_frequency=2,  # a merge seen once is a memory of the text, not a regularity
        initial_alphabet=_byte_characters(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    # After training, so that they are the last ids and play no part in it.
    library.add_special_tokens([BOS, EOS])
    return BpeTokenizer(library)


def load(path: Path) -> Tokenizer:
    """Read a tokenizer that `Tokenizer.save` wrote.

    Args:
        path: the file.

    Returns:
        The tokenizer, with the digest that the saved one had.

    Raises:
        DataError: the file cannot be read or is no tokenizer of ours.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if json.loads(text).get("kind") == ByteTokenizer.kind:
            return ByteTokenizer()
        return BpeTokenizer(tokenizers.Tokenizer.from_str(text))
    except Exception as error:  # the library raises bare Exception on a file that it cannot read
        raise DataError(f"tokenizer: {path} is not a tokenizer that can be loaded ({error})") from error


def open_tokenizer(kind: str, file: str) -> Tokenizer:
    """A tokenizer that is not trained on the corpus.

    Args:
        kind: "bytes", or "bpe" with a file.
        file: what `Tokenizer.save` wrote.

    Raises:
        DataError: the kind is not supported, or the file is no tokenizer of ours.
    """
    if kind == "bytes":
        return ByteTokenizer()
    if kind != "bpe":
        raise DataError(f"data.tokenizer: {kind!r} is not supported yet; use 'bytes' or 'bpe'")
    return load(Path(file))


def pieces(text: str, size: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a long text where it encodes as if it were not cut, so that memory and cores see even portions.

    Args:
        text: any text.
        size: characters a piece has at least, but for the last.

    Returns:
        Pieces that joined give the text, each but the last ending at a line feed before a visible character;
        a text without such a place is one piece.
    """
    start = 0
    while end := _PIECE_END.search(text, start + size):
        yield text[start : end.end()]
        start = end.end()
    yield text[start:]


def _splits_as_ours(content: dict[str, Any]) -> bool:
    match content["pre_tokenizer"]:
        case {"pretokenizers": [{"pattern": {"Regex": pattern}}, {"type": "ByteLevel", "use_regex": False}]}:
            return pattern == SPLIT_PATTERN
        case _:
            return False


def _byte_characters() -> list[str]:
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
