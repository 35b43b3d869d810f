"""The token store: a corpus tokenized once, memory-mapped ever after.

`prepare` gives the store of a `CorpusSpec`, building it when the cache has none. A store is a directory named
by a digest of everything that decides its content; it is written beside its place and renamed into it, so a
directory of that name is whole. Each split has its tokens (one array, documents end to end) and an index
(where each begins); each document is bos, its tokens, eos. meta.json counts it all and carries the digest of
every other file.
"""

import json
import logging
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import xxhash

from jax_titan.data.cache import building, discard, flush
from jax_titan.data.corpus import (
    BUNDLED,
    CorpusFile,
    CorpusSpec,
    corpus_digest,
    find_files,
    read_documents,
    require_unchanged,
)
from jax_titan.data.errors import DataError
from jax_titan.data.progress import TOKENIZING, TRAINING, Progress, silent
from jax_titan.data.split import SplitPlan, plan_split
from jax_titan.data.tokenizer import (
    SMALLEST_VOCAB,
    ByteTokenizer,
    Tokenizer,
    load,
    pieces,
    train_bpe,
)

FORMAT = 1
"""Version of the files, of the split and of the encoding; a store of another version is not reused."""

type Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split.__value__)

_BATCH_CHARACTERS = 1 << 22  # text that is tokenized at once: bounds memory, and keeps many cores busy
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SplitMeta:
    """Counts of one split.

    Args:
        documents: number of documents.
        tokens: number of tokens, each document's bos and eos included.
        text_bytes: UTF-8 bytes of its text.
    """

    documents: int
    tokens: int
    text_bytes: int


@dataclass(frozen=True)
class StoreMeta:
    """What meta.json says of a store.

    Args:
        format: `FORMAT` of the program that wrote it.
        digest: the name of the store.
        corpus_digest: identity of the text files, see `corpus.corpus_digest`.
        sources: where the text was read, for a person; not part of any digest.
        validation_fraction: as asked for.
        cut_at_byte: where the only document of the corpus was cut in two; null when there were several.
        tokenizer: `kind`, `vocab_size` and `digest` of the tokenizer.
        dtype: of the tokens on disk.
        splits: counts of each split.
        unigram_nats: see `TokenStore.unigram_nats`.
        files: `size_bytes` and `xxh3_128` of every other file of the store.
    """

    format: int
    digest: str
    corpus_digest: str
    sources: list[str]
    validation_fraction: float
    cut_at_byte: int | None
    tokenizer: dict[str, Any]
    dtype: str
    splits: dict[Split, SplitMeta]
    unigram_nats: float | None
    files: dict[str, dict[str, Any]]


class TokenStore:
    """A store, open: arrays on disk that are read where they are looked at.

    Args:
        directory: where it is.
        meta: what its meta.json says.
        tokenizer: its tokenizer.
    """

    def __init__(self, directory: Path, meta: StoreMeta, tokenizer: Tokenizer) -> None:
        self.directory = directory
        self.meta = meta
        self.tokenizer = tokenizer
        self._streams = {split: _map_tokens(directory, meta, split) for split in SPLITS}
        self._offsets = {split: np.load(directory / _index_name(split), mmap_mode="r") for split in SPLITS}

    @property
    def digest(self) -> str:
        """Identity of the content: corpus, split and tokenizer."""
        return self.meta.digest

    @property
    def vocab_size(self) -> int:
        """Number of token ids, specials included; see `Tokenizer.vocab_size`."""
        return self.tokenizer.vocab_size

    def documents(self, split: Split) -> int:
        """Number of documents of a split."""
        return self.meta.splits[split].documents

    def tokens(self, split: Split) -> int:
        """Number of tokens of a split, each document's bos and eos included."""
        return self.meta.splits[split].tokens

    def stream(self, split: Split) -> np.ndarray:
        """All tokens of a split, documents end to end: read-only uint16 or uint32 [tokens], on disk."""
        return self._streams[split]

    def offsets(self, split: Split) -> np.ndarray:
        """Where each document begins in `stream`, then the end: read-only int64 [documents + 1]."""
        return self._offsets[split]

    def document(self, split: Split, i: int) -> np.ndarray:
        """One document.

        Args:
            split: which split.
            i: its number, 0 to `documents(split) - 1`.

        Returns:
            Read-only uint16 or uint32 [tokens of the document]: bos, tokens, eos.

        Raises:
            IndexError: there is no such document.
        """
        if not 0 <= i < self.documents(split):
            raise IndexError(f"document {i}: the {split} split has {self.documents(split)}")
        begin, end = self._offsets[split][i : i + 2]
        return self._streams[split][begin:end]

    def unigram_nats(self) -> float | None:
        """The loss of a model that knows only how frequent each token is: the bar for a model that learns.

        Counted on the training documents, plus one for each token id, and scored on the validation documents,
        over the tokens that a model is scored on: all but the bos of each document.

        Returns:
            Mean nats a token, or None without validation documents.

        Source: Laplace's rule of succession; p(token) = (count + 1) / (tokens counted + vocab_size).
        """
        return self.meta.unigram_nats


def prepare(spec: CorpusSpec, cache_dir: Path | str, progress: Progress | None = None) -> TokenStore:
    """The token store of a corpus: from the cache, or built into it.

    Processes may prepare the same store at the same time, and may be killed at any point.

    Args:
        spec: the corpus and its tokenizer.
        cache_dir: where stores are kept; made when missing.
        progress: called with (done_bytes, total_bytes, what); see `progress.rich_progress`.

    Returns:
        The store, open. A cached one that is damaged is built again, with a warning in the log.

    Raises:
        DataError: the corpus or the cache directory is not usable; one line says where and the way out.
    """
    progress = progress or silent
    if spec.tokenizer == "bpe" and spec.vocab_size < SMALLEST_VOCAB:
        train_bpe([], spec.vocab_size)  # says so before the corpus is read
    files = find_files(spec.path)
    identity = corpus_digest(files, progress)
    digest = _store_digest(spec, files, identity)
    cache_dir = Path(cache_dir).expanduser()
    directory = cache_dir / digest
    try:
        if directory.exists():
            try:
                return open_store(directory, verify=True)
            except DataError as problem:
                _log.warning("token store %s is damaged, building it again (%s)", directory, problem.__cause__)
                discard(directory)
        with building(directory) as temporary:
            _build(temporary, spec, files, identity, digest, progress)
    except OSError as error:  # reading the corpus raises DataError, so this is the cache's
        raise DataError(
            f"data.cache: {cache_dir} cannot hold the token store ({error.strerror or error}); "
            "free space there or name a directory that can be written"
        ) from error
    return open_store(directory)


def open_store(directory: Path | str, verify: bool = False) -> TokenStore:
    """Open a store that `prepare` built.

    Args:
        directory: the store's directory.
        verify: read every file and compare its digest, rather than its size only.

    Returns:
        The store.

    Raises:
        DataError: it is not a whole store of this version.
    """
    directory = Path(directory)
    try:
        meta = _read_meta(directory)
        for name, recorded in meta.files.items():
            path = directory / name
            size_bytes = path.stat().st_size
            if size_bytes != recorded["size_bytes"]:
                raise DataError(f"{name} has {size_bytes} bytes instead of {recorded['size_bytes']}")
            if verify and _file_digest(path) != recorded["xxh3_128"]:
                raise DataError(f"the content of {name} has changed")
        return TokenStore(directory, meta, load(directory / _TOKENIZER))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"token store: {directory} is damaged or of another version ({reason}); "
            "delete it to have it built again"
        ) from error


# What is in the directory.

_META, _TOKENIZER = "meta.json", "tokenizer.json"


def _tokens_name(split: Split) -> str:
    return f"{split}.tokens"


def _index_name(split: Split) -> str:
    return f"{split}.index.npy"


def _map_tokens(directory: Path, meta: StoreMeta, split: Split) -> np.ndarray:
    tokens = meta.splits[split].tokens
    if not tokens:  # nothing cannot be mapped
        return np.empty(0, meta.dtype)
    return np.memmap(directory / _tokens_name(split), meta.dtype, mode="r", shape=(tokens,))


def _read_meta(directory: Path) -> StoreMeta:
    content = json.loads((directory / _META).read_text(encoding="utf-8"))
    if content["format"] != FORMAT:
        raise DataError(f"format {content['format']} instead of {FORMAT}")
    content["splits"] = {split: SplitMeta(**content["splits"][split]) for split in SPLITS}
    return StoreMeta(**content)


def _file_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _store_digest(spec: CorpusSpec, files: list[CorpusFile], identity: str) -> str:
    """A digest of what decides the content of a store, and of nothing else."""
    what = {
        "format": FORMAT,
        "corpus": identity,
        "tokenizer": spec.tokenizer,
        "vocab_size": spec.vocab_size if spec.tokenizer == "bpe" else None,
        "text_field": spec.text_field if any(file.is_jsonl for file in files) else None,
        "validation_fraction": float(spec.validation_fraction),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode())


# What is built.


def _build(
    directory: Path,
    spec: CorpusSpec,
    files: list[CorpusFile],
    identity: str,
    digest: str,
    progress: Progress,
) -> None:
    plan = plan_split(spec, files, progress)
    texts = partial(_texts, spec, files, plan)
    total_bytes = int(plan.text_bytes.sum())
    if spec.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    else:
        training = (text for text, validates in texts() if not validates)
        train_bytes = plan.bytes_of(validates=False)
        counted = _counted(chain.from_iterable(map(pieces, training)), train_bytes, progress)
        tokenizer = train_bpe(counted, spec.vocab_size)
    tokenizer.save(directory / _TOKENIZER)

    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    with (
        _SplitWriter(directory, "train", dtype, tokenizer) as train,
        _SplitWriter(directory, "validation", dtype, tokenizer) as validation,
    ):
        done_bytes = 0
        for batch in _batches(_marked_pieces(texts())):
            encoded = tokenizer.encode_batch([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                (validation if piece.validates else train).write(piece, ids)
                done_bytes += int(tokenizer.token_bytes[ids].sum())
            progress(done_bytes, total_bytes, TOKENIZING)
    require_unchanged(files)

    names = [_TOKENIZER, *map(_tokens_name, SPLITS), *map(_index_name, SPLITS)]
    meta = StoreMeta(
        format=FORMAT,
        digest=digest,
        corpus_digest=identity,
        sources=[f"bundled {BUNDLED.name}"] if not spec.path else [str(file.path) for file in files],
        validation_fraction=spec.validation_fraction,
        cut_at_byte=plan.cut_at_byte,
        tokenizer={
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "digest": tokenizer.digest,
        },
        dtype=dtype.str,
        splits={
            "train": train.meta(plan.bytes_of(validates=False)),
            "validation": validation.meta(plan.bytes_of(validates=True)),
        },
        unigram_nats=_unigram_nats(train.target_counts, validation.target_counts),
        files={
            name: {
                "size_bytes": (directory / name).stat().st_size,
                "xxh3_128": _file_digest(directory / name),
            }
            for name in names
        },
    )
    with (directory / _META).open("w", encoding="utf-8") as file:
        json.dump(asdict(meta), file, indent=1)
        flush(file)


def _texts(spec: CorpusSpec, files: list[CorpusFile], plan: SplitPlan) -> Iterator[tuple[str, bool]]:
    """Each document's text, and whether it validates."""
    documents = (document.text for document in read_documents(files, spec.text_field))
    if plan.cut_at_byte is not None:
        at = plan.cut_at_byte
        documents = (part for text in documents for part in (text[:at], text[at:]))
    try:
        for text, validates in zip(documents, plan.validates, strict=True):
            yield text.decode(), bool(validates)
    except ValueError:  # another number of documents than planned, or a cut that is now amid a character
        require_unchanged(files)
        raise


@dataclass(frozen=True)
class _Piece:
    """A part of a document that is tokenized on its own; see `tokenizer.pieces`."""

    text: str
    validates: bool
    is_first: bool
    is_last: bool


def _marked_pieces(texts: Iterable[tuple[str, bool]]) -> Iterator[_Piece]:
    for text, validates in texts:
        start = 0
        for piece in pieces(text):
            end = start + len(piece)
            yield _Piece(piece, validates, is_first=start == 0, is_last=end == len(text))
            start = end


def _batches(stream: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch, characters = [], 0
    for piece in stream:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _counted(texts: Iterable[str], total_bytes: int, progress: Progress) -> Iterator[str]:
    done_bytes = 0
    for text in texts:
        yield text
        done_bytes += len(text.encode())
        progress(done_bytes, total_bytes, TRAINING)


class _SplitWriter:
    """Appends documents to the files of one split, and counts what a model will be scored on.

    Args:
        directory: the store being built.
        split: whose files.
        dtype: of the tokens.
        tokenizer: gives bos and eos.
    """

    def __init__(self, directory: Path, split: Split, dtype: np.dtype, tokenizer: Tokenizer) -> None:
        self.target_counts = np.zeros(tokenizer.vocab_size, np.int64)
        self._dtype = dtype
        self._tokenizer = tokenizer
        self._offsets = array("q", [0])
        self._tokens = 0
        self._index = directory / _index_name(split)
        self._file = (directory / _tokens_name(split)).open("wb")

    def write(self, piece: _Piece, ids: np.ndarray) -> None:
        """Append a piece of a document, with bos before the first and eos after the last."""
        bos, eos = self._tokenizer.bos, self._tokenizer.eos
        targets = np.concatenate([ids, [eos]]) if piece.is_last else ids
        written = np.concatenate([[bos], targets]) if piece.is_first else targets
        self._file.write(written.astype(self._dtype).tobytes())
        self._tokens += len(written)
        np.add.at(self.target_counts, targets, 1)
        if piece.is_last:
            self._offsets.append(self._tokens)

    def meta(self, text_bytes: int) -> SplitMeta:
        """The counts so far."""
        return SplitMeta(len(self._offsets) - 1, self._tokens, text_bytes)

    def __enter__(self) -> "_SplitWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        with self._file:
            flush(self._file)
        with self._index.open("wb") as file:
            np.save(file, np.array(self._offsets, np.int64))
            flush(file)


def _unigram_nats(train_counts: np.ndarray, validation_counts: np.ndarray) -> float | None:
    scored = validation_counts.sum()
    if not scored:
        return None
    log_p = np.log(train_counts + 1) - np.log(train_counts.sum() + len(train_counts))
    return float(-(validation_counts * log_p).sum() / scored)
