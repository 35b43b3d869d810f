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
    Tokenizer,
    load,
    open_tokenizer,
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
        has_prompts: whether documents begin with tokens that are not scored.
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
    has_prompts: bool = False


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
        self._prompts = {
            split: np.load(directory / _prompts_name(split), mmap_mode="r") if meta.has_prompts else None
            for split in SPLITS
        }

    @property
    def directories(self) -> list[Path]:
        """Where it is; a mixture has several."""
        return [self.directory]

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

    def is_scored(self, split: Split, places: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Whether targets count: not where they belong to a prompt.

        Args:
            split: which split.
            places: where the targets lie in `stream`, any shape.
            documents: which document each belongs to.

        Returns:
            bool, of that shape.
        """
        prompts = self._prompts[split]
        if prompts is None:
            return np.ones(places.shape, bool)
        known = np.minimum(documents, len(prompts) - 1)  # padding belongs to a document that does not exist
        return places - self._offsets[split][known] > prompts[known]

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
    """The token store of a single corpus: from the cache, or built into it; see `mixture.prepare_corpora` for any.

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
    check_vocabulary(spec)
    files = find_files(spec.path)
    tokenizer = None if spec.trains_tokenizer else open_tokenizer(spec.tokenizer, spec.tokenizer_file)
    identity = corpus_digest(files, progress)
    digest = _store_digest(spec, files, identity, tokenizer)
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
            _build(temporary, spec, files, identity, digest, tokenizer, progress)
    except OSError as error:  # reading the corpus raises DataError, so this is the cache's
        raise DataError(
            f"data.cache: {cache_dir} cannot hold the token store ({error.strerror or error}); "
            "free space there or name a directory that can be written"
        ) from error
    return open_store(directory)


def check_vocabulary(spec: CorpusSpec) -> None:
    """Refuse a vocabulary that is too small to train before the corpus is read; raises DataError."""
    if spec.trains_tokenizer and spec.vocab_size < SMALLEST_VOCAB:
        train_bpe([], spec.vocab_size)


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


def _prompts_name(split: Split) -> str:
    return f"{split}.prompts.npy"


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


def _store_digest(spec: CorpusSpec, files: list[CorpusFile], identity: str, tokenizer: Tokenizer | None) -> str:
    """A digest of what decides the content of a store, and of nothing else."""
    what = {
        "format": FORMAT,
        "corpus": identity,
        "tokenizer": spec.tokenizer,
        "vocab_size": spec.vocab_size if spec.trains_tokenizer else None,
        "text_field": spec.text_field if any(file.has_fields for file in files) else None,
        "validation_fraction": float(spec.validation_fraction),
    }
    if spec.tokenizer_file or spec.tokenizer not in ("bytes", "bpe"):
        assert tokenizer is not None
        what["tokenizer_digest"] = tokenizer.digest
    if spec.prompt_field:
        what["prompt_field"] = spec.prompt_field
    return xxhash.xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode())


# What is built.


def _build(
    directory: Path,
    spec: CorpusSpec,
    files: list[CorpusFile],
    identity: str,
    digest: str,
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> None:
    plan = plan_split(spec, files, progress)
    total_bytes = int(plan.text_bytes.sum())
    if tokenizer is None:
        training = training_pieces(spec, files, plan)
        tokenizer = train_bpe(_counted(training, plan.bytes_of(validates=False), progress), spec.vocab_size)
    tokenizer.save(directory / _TOKENIZER)

    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    with (
        _SplitWriter(directory, "train", dtype, tokenizer, bool(spec.prompt_field)) as train,
        _SplitWriter(directory, "validation", dtype, tokenizer, bool(spec.prompt_field)) as validation,
    ):
        done_bytes = 0
        for batch in _batches(_marked_pieces(_documents(spec, files, plan), tokenizer)):
            encoded = tokenizer.encode_batch([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                (validation if piece.validates else train).write(piece, ids)
                done_bytes += int(tokenizer.token_bytes[ids].sum())
            progress(done_bytes, total_bytes, TOKENIZING)
    require_unchanged(files)

    names = [_TOKENIZER, *map(_tokens_name, SPLITS), *map(_index_name, SPLITS)]
    if spec.prompt_field:
        names += map(_prompts_name, SPLITS)
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
        has_prompts=bool(spec.prompt_field),
    )
    with (directory / _META).open("w", encoding="utf-8") as file:
        json.dump(asdict(meta), file, indent=1)
        flush(file)


def _documents(spec: CorpusSpec, files: list[CorpusFile], plan: SplitPlan) -> Iterator[tuple[str, str, bool]]:
    """Each document's prompt and text, and whether it validates."""
    read = read_documents(files, spec.text_field, spec.prompt_field)
    documents = ((document.prompt, document.text) for document in read)
    if plan.cut_at_byte is not None:
        at = plan.cut_at_byte
        documents = (part for _, text in documents for part in ((b"", text[:at]), (b"", text[at:])))
    try:
        for (prompt, text), validates in zip(documents, plan.validates, strict=True):
            yield prompt.decode(), text.decode(), bool(validates)
    except ValueError:  # another number of documents than planned, or a cut that is now amid a character
        require_unchanged(files)
        raise


def training_pieces(spec: CorpusSpec, files: list[CorpusFile], plan: SplitPlan) -> Iterator[str]:
    """The text of the training documents, prompts included, in portions: what a vocabulary is trained on."""
    for prompt, text, validates in _documents(spec, files, plan):
        if not validates:
            yield from pieces(prompt) if prompt else ()
            yield from pieces(text)


@dataclass(frozen=True)
class _Piece:
    """A part of a document that is tokenized on its own; see `Tokenizer.pieces`."""

    text: str
    validates: bool
    is_prompt: bool
    is_first: bool
    is_last: bool


def _marked_pieces(documents: Iterable[tuple[str, str, bool]], tokenizer: Tokenizer) -> Iterator[_Piece]:
    for prompt, text, validates in documents:
        # Tokenized apart, as they are when the model is asked: the prompt must not depend on its answer.
        is_first = True
        for is_prompt, part in ((True, prompt), (False, text)):
            start = 0
            for piece in tokenizer.pieces(part) if part else ():
                start += len(piece)
                yield _Piece(piece, validates, is_prompt, is_first, not is_prompt and start == len(part))
                is_first = False


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
        has_prompts: whether to write how many tokens of each document are not scored.
    """

    def __init__(
        self, directory: Path, split: Split, dtype: np.dtype, tokenizer: Tokenizer, has_prompts: bool
    ) -> None:
        self.target_counts = np.zeros(tokenizer.vocab_size, np.int64)
        self._dtype = dtype
        self._tokenizer = tokenizer
        self._offsets = array("q", [0])
        self._tokens = 0
        self._prompt_tokens = array("i", [0]) if has_prompts else None
        self._prompts = directory / _prompts_name(split)
        self._index = directory / _index_name(split)
        self._file = (directory / _tokens_name(split)).open("wb")

    def write(self, piece: _Piece, ids: np.ndarray) -> None:
        """Append a piece of a document, with bos before the first and eos after the last."""
        bos, eos = self._tokenizer.bos, self._tokenizer.eos
        targets = np.concatenate([ids, [eos]]) if piece.is_last else ids
        written = np.concatenate([[bos], targets]) if piece.is_first else targets
        self._file.write(written.astype(self._dtype).tobytes())
        self._tokens += len(written)
        if piece.is_prompt:
            assert self._prompt_tokens is not None
            self._prompt_tokens[-1] += len(targets)
        else:
            np.add.at(self.target_counts, targets, 1)
        if piece.is_last:
            self._offsets.append(self._tokens)
            if self._prompt_tokens is not None:
                self._prompt_tokens.append(0)

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
        if self._prompt_tokens is not None:
            with self._prompts.open("wb") as file:
                np.save(file, np.array(self._prompt_tokens[:-1], np.int32))
                flush(file)


def _unigram_nats(train_counts: np.ndarray, validation_counts: np.ndarray) -> float | None:
    scored = validation_counts.sum()
    if not scored:
        return None
    log_p = np.log(train_counts + 1) - np.log(train_counts.sum() + len(train_counts))
    return float(-(validation_counts * log_p).sum() / scored)
