"""Several corpora by weight: each has a token store of its own, and one tokenizer serves them all."""

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import xxhash

from jax_titan.data.cache import building, discard
from jax_titan.data.corpus import CorpusSpec, corpus_digest, find_files
from jax_titan.data.errors import DataError
from jax_titan.data.progress import Progress, silent
from jax_titan.data.split import plan_split
from jax_titan.data.store import FORMAT, Split, TokenStore, check_vocabulary, prepare, training_pieces
from jax_titan.data.tokenizer import Tokenizer, load, train_bpe


def prepare_corpora(
    spec: CorpusSpec, cache_dir: Path | str, progress: Progress | None = None
) -> "TokenStore | MixtureStore":
    """The token store of a corpus or of a mixture of them: from the cache, or built into it.

    Args:
        spec: the corpus, or the corpora.
        cache_dir: where stores are kept; made when missing.
        progress: called with (done_bytes, total_bytes, what); see `progress.rich_progress`.

    Returns:
        The store, open.

    Raises:
        DataError: a corpus or the cache directory is not usable; one line says where and the way out.
    """
    if not spec.mixture:
        return prepare(spec, cache_dir, progress)
    check_vocabulary(spec)
    alone = [dataclasses.replace(spec, path=path, mixture=()) for path, _ in spec.mixture]
    if spec.trains_tokenizer:
        file = str(_common_vocabulary(alone, Path(cache_dir).expanduser(), progress or silent))
        alone = [dataclasses.replace(one, tokenizer_file=file) for one in alone]
    return MixtureStore(
        tuple(prepare(one, cache_dir, progress) for one in alone),
        tuple(weight for _, weight in spec.mixture),
    )


def _common_vocabulary(corpora: list[CorpusSpec], cache_dir: Path, progress: Progress) -> Path:
    """The file of a vocabulary trained on the training documents of several corpora."""
    files = [find_files(one.path) for one in corpora]
    first = corpora[0]
    what = {
        "format": FORMAT,
        "corpora": [corpus_digest(some, progress) for some in files],
        "vocab_size": first.vocab_size,
        "fields": [first.text_field, first.prompt_field],
        "validation_fraction": float(first.validation_fraction),
    }
    directory = cache_dir / f"bpe-{xxhash.xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode())}"
    path = directory / "tokenizer.json"
    try:
        if directory.exists():
            try:
                load(path)
                return path
            except DataError:
                discard(directory)
        with building(directory) as temporary:
            plans = [plan_split(one, some, progress) for one, some in zip(corpora, files, strict=True)]
            pieces = (training_pieces(*each) for each in zip(corpora, files, plans, strict=True))
            train_bpe(chain.from_iterable(pieces), first.vocab_size).save(temporary / path.name)
    except OSError as error:
        raise DataError(
            f"data.cache: {cache_dir} cannot hold the vocabulary ({error.strerror or error}); "
            "free space there or name a directory that can be written"
        ) from error
    return path


@dataclass(frozen=True)
class MixtureStore:
    """Token stores and how often a row is drawn from each; reads like one `TokenStore`.

    Args:
        stores: one for each corpus, of one tokenizer.
        weights: how often a row comes from each, in any unit.

    Raises:
        DataError: the stores have different tokenizers.
    """

    stores: tuple[TokenStore, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len({store.tokenizer.digest for store in self.stores}) > 1:
            raise DataError("data.mixture: its corpora were prepared with different tokenizers; prepare them anew")

    @property
    def directories(self) -> list[Path]:
        """Where the stores are."""
        return [store.directory for store in self.stores]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all of them."""
        return self.stores[0].tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids, specials included."""
        return self.tokenizer.vocab_size

    @cached_property
    def digest(self) -> str:
        """Identity of the content: that of each corpus, and its share."""
        total = sum(self.weights)
        parts = [f"{s.digest} {w / total:.12g}" for s, w in zip(self.stores, self.weights, strict=True)]
        return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())

    def documents(self, split: Split) -> int:
        """Number of documents of a split, over all corpora."""
        return sum(store.documents(split) for store in self.stores)

    def tokens(self, split: Split) -> int:
        """Number of tokens of a split, over all corpora."""
        return sum(store.tokens(split) for store in self.stores)

    def unigram_nats(self) -> float | None:
        """The loss of a model that knows which corpus a token is from and how frequent it is there: the mean of
        the corpora's own, by their validation tokens. A stricter bar than one frequency for all."""
        scored = [store.tokens("validation") - store.documents("validation") for store in self.stores]
        nats = [store.unigram_nats() for store in self.stores]
        known = [(n, s) for n, s in zip(nats, scored, strict=True) if n is not None and s > 0]
        if not known:
            return None
        values, weights = zip(*known, strict=True)
        return float(np.average(values, weights=weights))
