"""Tokenizers by kind: bytes, our own BPE, Llama 3's, and Hugging Face's; opening, saving and loading them.

What all have in common is in `tokenizer_base`; each other kind has a file of its own.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import xxhash

from jax_titan.data.bpe import SMALLEST_VOCAB, SPLIT_PATTERN, BpeTokenizer, is_ours, train_bpe
from jax_titan.data.errors import DataError
from jax_titan.data.huggingface import HuggingFaceTokenizer, read_tokenizer_json
from jax_titan.data.llama3 import Llama3Tokenizer, installed_model, read_ranks
from jax_titan.data.tokenizer_base import BOS, EOS, Tokenizer, pieces

__all__ = [
    "BOS",
    "EOS",
    "SMALLEST_VOCAB",
    "SPLIT_PATTERN",
    "BpeTokenizer",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "Llama3Tokenizer",
    "Tokenizer",
    "load",
    "open_tokenizer",
    "pieces",
    "train_bpe",
]

_FILES = {
    "bytes": ("tokenizer.json",),
    "bpe": ("tokenizer.json",),
    "llama3": ("tokenizer.model", "original/tokenizer.model", "tokenizer.json"),
    "huggingface": ("tokenizer.json",),
}
"""The kinds, and where in a directory each one's file is; ours in a run directory is a tokenizer.json."""


class ByteTokenizer(Tokenizer):
    """One token a byte of UTF-8, ids 0 to 255, then the two specials."""

    kind = "bytes"

    def __init__(self) -> None:
        self.bos, self.eos = 256, 257
        self.specials = {BOS: self.bos, EOS: self.eos}
        self._token_texts = [bytes([byte]) for byte in range(256)] + [b"", b""]

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self._serialized().encode())

    def describe(self) -> str:
        return f"UTF-8 bytes, {self.vocab_size} tokens"

    def _encode_ordinary(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def _serialized(self) -> str:
        return json.dumps({"kind": self.kind, "version": 1})


def load(path: Path) -> Tokenizer:
    """Read a tokenizer that `Tokenizer.save` wrote.

    Args:
        path: the file.

    Returns:
        The tokenizer, with the digest that the saved one had.

    Raises:
        DataError: the file cannot be read or is no tokenizer of ours.
    """
    return _load(path, "tokenizer")


def open_tokenizer(kind: str, file: str) -> Tokenizer:
    """A tokenizer that is not trained on the corpus.

    Args:
        kind: "bytes", "bpe", "llama3" or "huggingface".
        file: what holds it, or a directory with that in it. bpe: a file that `Tokenizer.save` wrote; llama3: a
            `tokenizer.model`, by default that of the package llama-models; huggingface: a `tokenizer.json`. Each
            takes what `Tokenizer.save` wrote for its kind; bytes needs no file.

    Raises:
        DataError: the kind is unknown, or the file is missing or is no tokenizer of that kind.
    """
    if kind not in _FILES:
        raise DataError(f"data.tokenizer: {kind!r} is not known; use one of {', '.join(_FILES)}")
    if kind == "bytes" and not file:
        return ByteTokenizer()
    path = _find(kind, file)
    data = _read(path)
    if not data.lstrip().startswith(b"{"):
        if kind == "llama3":
            return read_ranks(data, path)
        read_ranks(data, path)  # says so if it is no tokenizer at all
        raise _other_kind(path, "llama3")
    content = _parse(data, path)
    if "kind" in content or (kind == "bpe" and is_ours(content)):
        return _of_kind(kind, path)
    if kind != "huggingface":
        raise _other_kind(path, "huggingface")
    return read_tokenizer_json(content, path)


def _find(kind: str, file: str) -> Path:
    if not file:
        if kind == "llama3":
            return installed_model()
        what = "a tokenizer.json" if kind == "huggingface" else "one that jax-titan saved"
        raise DataError(f"data.tokenizer_file: {kind} needs a file; give the path of {what}")
    path = Path(file)
    if not path.is_dir():
        return path
    for name in _FILES[kind]:
        if (path / name).is_file():
            return path / name
    raise DataError(
        f"data.tokenizer_file: {path} has no {_FILES[kind][0]} in it; give the file, or the directory with it"
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"data.tokenizer_file: {path} cannot be read ({error.strerror}); give another") from None


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError as error:
        raise DataError(f"data.tokenizer_file: {path} is damaged ({error}); get it again") from None
    if "kind" not in content and not isinstance(content.get("model"), dict):
        raise DataError(f"data.tokenizer_file: {path} has no model in it; give a tokenizer.json")
    return content


def _of_kind(kind: str, path: Path) -> Tokenizer:
    tokenizer = _load(path, "data.tokenizer_file")
    if tokenizer.kind != kind:
        raise _other_kind(path, tokenizer.kind)
    return tokenizer


def _load(path: Path, field: str) -> Tokenizer:
    try:
        return _of_saved(json.loads(path.read_bytes()))
    except Exception as error:  # the library raises bare Exception on a file that it cannot read
        raise DataError(f"{field}: {path} is not a tokenizer that can be loaded ({error})") from error


def _other_kind(path: Path, kind: str) -> DataError:
    return DataError(f"data.tokenizer_file: {path} is of another kind; use data.tokenizer {kind} with it")


def _of_saved(content: dict[str, Any]) -> Tokenizer:
    match content.get("kind"):
        case "bytes":
            return ByteTokenizer()
        case "llama3":
            return Llama3Tokenizer.of_saved(content)
        case "huggingface":
            return HuggingFaceTokenizer.of_saved(content)
        case _:
            return BpeTokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))
