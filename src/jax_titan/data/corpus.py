"""A corpus: files on disk, read as a sequence of documents.

A text file is one document; a `.jsonl` file is one a line, a `.parquet` file one a row; a directory is all such
files below it, by relative path. Text may be compressed (`.gz`, `.xz`). Documents pass through here as UTF-8
bytes, one at a time, and are checked on the way: whatever is wrong with the text of a user is said here, with the
file and the place in it.
"""

import codecs
import gzip
import json
import lzma
import math
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import xxhash

from jax_titan.data.errors import DataError
from jax_titan.data.progress import READING, Progress, silent

BUNDLED = Path(__file__).parent / "corpora" / "moby-dick.jsonl.xz"
"""The corpus that an empty `data.path` stands for; see corpora/README.md."""

_COMPRESSIONS = (".gz", ".xz")
_TOKENIZERS = ("bytes", "bpe", "llama3", "huggingface")
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class CorpusSpec:
    """Which text to train on, and how it becomes tokens.

    Args:
        path: a text file, a `.jsonl` file (either may end in .gz or .xz), a `.parquet` file or a directory; "" is
            the bundled corpus.
        tokenizer: "bytes" (nothing to train), "bpe" (byte-level BPE trained on the training documents), "llama3"
            or "huggingface" (from a file).
        vocab_size: tokens in the trained vocabulary, both specials included; not used by the others.
        text_field: the field of a JSON line, or the column, that holds the text.
        validation_fraction: the share of the text, by bytes, whose documents are kept for validation; 0 keeps
            none.
        tokenizer_file: the tokenizer's file, where it is not trained; see `tokenizer.open_tokenizer`.
        prompt_field: the field whose text comes before and is not scored; "" for none.
        mixture: several corpora instead of `path`, each with its weight.

    Raises:
        DataError: a value no corpus can be prepared with.
    """

    path: str = ""
    tokenizer: Literal["bytes", "bpe", "llama3", "huggingface"] = "bytes"
    vocab_size: int = 4096
    text_field: str = "text"
    validation_fraction: float = 0.05
    tokenizer_file: str = ""
    prompt_field: str = ""
    mixture: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.tokenizer not in _TOKENIZERS:
            known = ", ".join(map(repr, _TOKENIZERS))
            raise DataError(f"data.tokenizer: {self.tokenizer!r} is not known; use one of {known}")
        if self.mixture and self.path:
            raise DataError("data.mixture: it names the corpora, and so does data.path; leave one of them empty")
        if not (math.isfinite(self.validation_fraction) and 0 <= self.validation_fraction < 1):
            raise DataError(
                f"data.validation_fraction: {self.validation_fraction} is not in [0, 1); "
                "use 0.05, or 0 to train on everything"
            )

    @property
    def trains_tokenizer(self) -> bool:
        """Whether the vocabulary is made from the corpus itself."""
        return self.tokenizer == "bpe" and not self.tokenizer_file


def parse_mixture(text: str) -> tuple[tuple[str, float], ...]:
    """What `data.mixture` says: "books.jsonl=3, code/=1".

    Args:
        text: corpora with commas between them, each a path, "=" and a weight.

    Returns:
        Paths and weights.

    Raises:
        DataError: a part that is not of that form, a corpus named twice or one that is not there.
    """
    parts: dict[str, float] = {}
    for part in text.split(","):
        path, _, weight = part.strip().rpartition("=")
        if not path:
            raise DataError(f"data.mixture: {part.strip()!r} is not PATH=WEIGHT; write for example books.jsonl=3")
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise DataError(f"data.mixture: {path}: {weight.strip()!r} is not a weight; use a number above 0")
        path = path.strip()
        if path in parts:
            raise DataError(f"data.mixture: {path} occurs twice; give its whole weight once")
        if not Path(path).expanduser().exists():
            raise DataError(f"data.mixture: {path} does not exist; name files or directories of text")
        parts[path] = value
    return tuple(parts.items())


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus.

    Args:
        name: its path below the corpus directory, with "/"; the file's own name when the corpus is one file.
        path: where it is.
        size_bytes: its size on disk, compressed or not.
        modified_ns: when it was last written, in nanoseconds since 1970.
    """

    name: str
    path: Path
    size_bytes: int
    modified_ns: int

    @property
    def compression(self) -> str:
        """How it is compressed, by the ending of its name: ".gz", ".xz" or "" for not at all."""
        suffix = self.path.suffix.lower()
        return suffix if suffix in _COMPRESSIONS else ""

    @property
    def is_jsonl(self) -> bool:
        """Whether it holds a document a line."""
        return self.name.lower().removesuffix(self.compression).endswith(".jsonl")

    @property
    def is_parquet(self) -> bool:
        """Whether it holds a document a row; what is neither this nor JSON lines is one document."""
        return self.name.lower().endswith(".parquet")

    @property
    def has_fields(self) -> bool:
        """Whether its documents have named parts."""
        return self.is_jsonl or self.is_parquet


@dataclass(frozen=True)
class Document:
    """One document that is not empty.

    Args:
        text: its UTF-8 bytes.
        corpus_bytes: bytes on disk read up to here over all files, to tell how far a pass is.
        prompt: UTF-8 bytes that come before it and are not scored.
    """

    text: bytes
    corpus_bytes: int
    prompt: bytes = b""

    @property
    def all_bytes(self) -> int:
        """UTF-8 bytes of both."""
        return len(self.prompt) + len(self.text)


def find_files(path: str) -> list[CorpusFile]:
    """The files of a corpus, in the order in which they are read.

    Args:
        path: `CorpusSpec.path`.

    Returns:
        One file, or the `*.txt`, `*.jsonl` (also .gz and .xz) and `*.parquet` files below a directory, by relative
        path.
        What lies in a directory or a file whose name starts with a dot is left out, and so are linked
        directories.

    Raises:
        DataError: nothing there, nothing to read there, or no permission to look.
    """
    root = Path(path).expanduser() if path else BUNDLED
    try:
        mode = root.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({_reason(error)})"
        raise DataError(
            f"data.path: {path} {reason}; give a text file, a .jsonl file or a directory of them, "
            "or nothing for the bundled corpus"
        ) from error
    if stat.S_ISDIR(mode):
        names = sorted(_text_names(root, path))
        if not names:
            raise DataError(
                f"data.path: {path} holds no *.txt, *.jsonl (plain, .gz or .xz) or *.parquet files; "
                "name the file itself if its name ends otherwise"
            )
        return [_corpus_file(name, root / name) for name in names]
    if not stat.S_ISREG(mode):
        raise DataError(f"data.path: {path} is neither a file nor a directory; copy its text to a file first")
    return [_corpus_file(root.name, root)]


def _corpus_file(name: str, path: Path) -> CorpusFile:
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return CorpusFile(name, path, status.st_size, status.st_mtime_ns)


def _text_names(root: Path, path: str) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise DataError(f"data.path: {path} cannot be listed ({_reason(error)} at {error.filename})") from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            stem = name.lower().removesuffix(".gz").removesuffix(".xz")
            is_text = stem.endswith((".txt", ".jsonl")) or name.lower().endswith(".parquet")
            if is_text and not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def corpus_digest(files: list[CorpusFile], progress: Progress = silent) -> str:
    """The identity of a corpus: contents and relative names of its files, not their place or their dates.

    Args:
        files: the files of the corpus, in order.
        progress: told the bytes read of all.

    Returns:
        xxh3_128 in hexadecimal.

    Raises:
        DataError: a file cannot be read.
    """
    total_bytes = sum(file.size_bytes for file in files)
    done_bytes = 0
    digest = xxhash.xxh3_128()
    for file in files:
        content = xxhash.xxh3_128()
        try:
            with file.path.open("rb") as source:
                while block := source.read(_READ_BYTES):
                    content.update(block)
                    done_bytes += len(block)
                    progress(done_bytes, total_bytes, READING)
        except OSError as error:
            raise _unreadable(file.path, error) from error
        name = os.fsencode(file.name)
        digest.update(len(name).to_bytes(8) + name + content.digest())
    return digest.hexdigest()


def require_unchanged(files: list[CorpusFile]) -> None:
    """Check that a corpus is still what it was when it was found, for it is read several times.

    Args:
        files: the files as found.

    Raises:
        DataError: one was written to or is gone.
    """
    for file in files:
        if _corpus_file(file.name, file.path) != file:
            raise DataError(f"data.path: {file.path} changed while it was read; start again")


def read_documents(files: list[CorpusFile], text_field: str, prompt_field: str = "") -> Iterator[Document]:
    """Every document of a corpus that is not empty, in order.

    Args:
        files: the files of the corpus.
        text_field: the field of a JSON line, or the column, that holds its text.
        prompt_field: the one that holds what comes before it; "" for none.

    Returns:
        An iterator that holds one document at a time.

    Raises:
        DataError: a file that cannot be read or decompressed, is not UTF-8, holds a line that is not a JSON
            object with texts in those fields, or has no fields where a prompt is asked for.
    """
    fields = (text_field, *([prompt_field] if prompt_field else []))
    earlier_bytes = 0
    for file in files:
        try:
            if prompt_field and not file.has_fields:
                raise DataError(
                    f"data.prompt_field: {file.path} is plain text and has no fields; use JSON lines or Parquet"
                )
            with file.path.open("rb") as raw, _decompressed(raw, file) as source:
                for text, *prompt in _records(file, source, fields):
                    if text:
                        yield Document(text, earlier_bytes + raw.tell(), b"".join(prompt))
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"data.path: {file.path} is not a whole {file.compression} file ({_reason(error)}); copy it again"
            ) from error
        except OSError as error:
            raise _unreadable(file.path, error) from error
        earlier_bytes += file.size_bytes


def _decompressed(raw: IO[bytes], file: CorpusFile) -> IO[bytes]:
    match file.compression:
        case ".gz":
            return gzip.GzipFile(fileobj=raw)  # pyright: ignore[reportReturnType]
        case ".xz":
            return lzma.LZMAFile(raw)
        case _:
            return raw


def _records(file: CorpusFile, source: IO[bytes], fields: tuple[str, ...]) -> Iterator[tuple[bytes, ...]]:
    """The fields of each document: its text, and its prompt if one is asked for."""
    if file.is_jsonl:
        return _jsonl_records(file, source, fields)
    if file.is_parquet:
        from jax_titan.data.parquet import parquet_records

        return parquet_records(file.path, source, fields)
    return _whole_text(file, source)


def _whole_text(file: CorpusFile, source: IO[bytes]) -> Iterator[tuple[bytes]]:
    text = source.read()
    _decode(file, text, offset=0)
    yield (text.removeprefix(codecs.BOM_UTF8),)  # it says how the text is stored and is not part of the text


def _jsonl_records(file: CorpusFile, source: IO[bytes], fields: tuple[str, ...]) -> Iterator[tuple[bytes, ...]]:
    offset = 0
    for number, line in enumerate(source, start=1):
        text = _decode(file, line, offset)
        offset += len(line)
        if number == 1:
            text = text.removeprefix("\ufeff")
        if text.strip():
            yield _line_texts(f"{file.path} line {number}", text, fields)


def _line_texts(place: str, line: str, fields: tuple[str, ...]) -> tuple[bytes, ...]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        cut = "" if line.endswith("\n") else "; it is the last line, so the file may be cut short"
        raise DataError(
            f"data.path: {place} is not valid JSON ({_reason(error)}){cut}; mend or remove the line"
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            f'data.path: {place} holds {_json_name(record)}, not an object; write {{"{fields[0]}": "..."}}'
        )
    options = ("data.text_field", "data.prompt_field")
    return tuple(_field(place, record, name, option) for name, option in zip(fields, options, strict=False))


def _field(place: str, record: dict, name: str, option: str) -> bytes:
    if name not in record:
        raise DataError(f"{option}: {place} has no field '{name}'; it has: {', '.join(record) or 'none'}")
    text = record[name]
    if not isinstance(text, str):
        raise DataError(f"{option}: {place}: '{name}' is {_json_name(text)}, not a text; name another field")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"data.path: {place}: '{name}' has half a surrogate pair at character {error.start}, "
            "which is not a character; remove it"
        ) from error


def _decode(file: CorpusFile, text: bytes, offset: int) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.path: {file.path} is not UTF-8: byte 0x{text[error.start]:02x} "
            f"at offset {offset + error.start}; convert it, for example with iconv -f latin1 -t utf-8"
        ) from error


def _json_name(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"data.path: {path} cannot be read ({_reason(error)}); mend it or remove it from the corpus")


def _reason(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
