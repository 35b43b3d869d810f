"""The tokenizer of Llama 3: byte-level BPE from a file of ranks, encoded by the library tiktoken."""

import base64
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import xxhash

from jax_titan.data.errors import DataError
from jax_titan.data.tokenizer_base import BOS, EOS, Tokenizer

# Llama 3's split (its reference tokenizer, class Tokenizer, `pat_str`), but for the part before `\s+(?!\S)`. The
# regular-expression engine remembers each character that `\s+` may give back, a million at most, and a longer run
# of white space would end the program. Taking 64 at a time while 64 more follow leaves it less to remember; the
# match is the same.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|(?:\s{64}(?=\s{64}))*\s+(?!\S)|\s+"
)
_SPECIALS = 256
_NAMED_SPECIALS = {
    0: BOS,
    1: EOS,
    4: "<|finetune_right_pad_id|>",
    5: "<|step_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
"""Those of Llama 3.1 that are in use, by place after the ranks; the others are numbered and reserved."""


class Llama3Tokenizer(Tokenizer):
    """Byte-level BPE with the ranks of a Llama 3 `tokenizer.model`, then 256 specials.

    Ids are those of tiktoken given the whole text. Meta's reference cuts text after 400,000 characters, and runs
    of white space or of visible characters after 25,000, wherever that falls; this tokenizer does not.

    Args:
        tokens: the bytes of each token, by rank.

    Raises:
        DataError: a token occurs twice, or one of the 256 bytes is none.

    Source: Grattafiori et al. 2024, arXiv 2407.21783, section 3.2 (128,000 tokens and the specials);
    meta-llama/llama-models, models/llama3/tokenizer.py (which specials).
    """

    kind = "llama3"

    def __init__(self, tokens: list[bytes]) -> None:
        ranks = {token: rank for rank, token in enumerate(tokens)}
        if len(ranks) < len(tokens):
            raise DataError("a token occurs twice")
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise DataError(f"the byte {missing[0]:#04x} is no token")
        self.specials = {spelling: len(tokens) + place for place, spelling in enumerate(_special_spellings())}
        self.bos, self.eos = self.specials[BOS], self.specials[EOS]
        self._token_texts = [*tokens, *[b""] * _SPECIALS]
        self._encoding = tiktoken.Encoding(
            self.kind, pat_str=_SPLIT, mergeable_ranks=ranks, special_tokens=self.specials
        )

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({self.eos, self.specials["<|eot_id|>"], self.specials["<|eom_id|>"]})

    @cached_property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(json.dumps([self.kind, 1, self._ranks]).encode())

    def describe(self) -> str:
        return f"Llama 3, {self.vocab_size:,} tokens"

    def _encode_ordinary(self, texts: Sequence[str]) -> list[np.ndarray]:
        # tiktoken lets go of the interpreter's lock while it encodes.
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(self._encode_one, texts))

    def _encode_one(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int32)

    @cached_property
    def _ranks(self) -> list[str]:
        return [base64.b64encode(token).decode() for token in self._token_texts[:-_SPECIALS]]

    def _serialized(self) -> str:
        return json.dumps({"kind": self.kind, "version": 1, "digest": self.digest, "ranks": self._ranks})

    @classmethod
    def of_saved(cls, content: dict[str, Any]) -> "Llama3Tokenizer":
        """The tokenizer in a file that `save` wrote.

        Args:
            content: the file, parsed.

        Raises:
            ValueError: the file is damaged.
        """
        tokenizer = cls([base64.b64decode(token, validate=True) for token in content["ranks"]])
        if tokenizer.digest != content["digest"]:
            raise DataError("its content does not match its digest")
        return tokenizer


def read_ranks(data: bytes, path: Path) -> Llama3Tokenizer:
    """The tokenizer in a `tokenizer.model`: lines of a token in base64, a space, and its rank.

    Args:
        data: content of the file.
        path: its name, for errors.

    Raises:
        DataError: a line is broken, or the ranks make no tokenizer.
    """
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            tokens[int(rank)] = base64.b64decode(token, validate=True)
        except ValueError:
            raise DataError(
                f"data.tokenizer_file: {path} line {number} is not a token in base64 and its rank; get the "
                "tokenizer.model of Llama 3 again, or use data.tokenizer huggingface with a tokenizer.json"
            ) from None
    try:
        if any(rank not in tokens for rank in range(len(tokens))):
            raise DataError("its ranks are not 0, 1, 2 and so on")
        return Llama3Tokenizer([tokens[rank] for rank in range(len(tokens))])
    except DataError as error:
        raise DataError(
            f"data.tokenizer_file: {path} is no tokenizer.model of Llama 3 ({error}); get it again"
        ) from None


def installed_model() -> Path:
    """The `tokenizer.model` of the optional package llama-models.

    Raises:
        DataError: it is not installed.
    """
    package = find_spec("llama_models")
    for place in (package and package.submodule_search_locations) or ():
        path = Path(place) / "llama3" / "tokenizer.model"
        if path.is_file():
            return path
    raise DataError(
        "data.tokenizer_file: llama3 needs a file, and the package llama-models, which has one, is not installed; "
        "give the path of a tokenizer.model, or pip install 'jax-titan[llama]'"
    )


def _special_spellings() -> list[str]:
    # Two stand before the first that Llama 3.1 gave names to, the others count on behind the last of those.
    spellings, reserved = [], 0
    for place in range(_SPECIALS):
        if place in _NAMED_SPECIALS:
            spellings.append(_NAMED_SPECIALS[place])
        else:
            spellings.append(f"<|reserved_special_token_{reserved}|>")
            reserved += 1
    return spellings
