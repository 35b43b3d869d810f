"""The text of a run: from its configuration to an open token store and the datasets of its splits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jax_titan.config import Config, ConfigError
from jax_titan.data.corpus import CorpusSpec, parse_mixture
from jax_titan.data.mixture import MixtureStore, prepare_corpora
from jax_titan.data.progress import rich_progress
from jax_titan.data.store import SPLITS, TokenStore
from jax_titan.data.text import TextDataset

TOKENIZER = "tokenizer.json"
"""The file of a run directory that holds its tokenizer, of whatever kind."""


def corpus_spec(config: Config) -> CorpusSpec:
    """What the section `data` asks for.

    A run that starts from another's weights also takes over the vocabulary that was trained for them.
    """
    d = config.data
    spec = CorpusSpec(
        path=d.path,
        tokenizer=d.tokenizer,
        vocab_size=d.vocab_size,
        text_field=d.text_field,
        validation_fraction=d.validation_fraction,
        tokenizer_file=d.tokenizer_file,
        prompt_field=d.prompt_field,
        mixture=parse_mixture(d.mixture) if d.mixture else (),
    )
    if d.tokenizer != "bpe" or d.tokenizer_file or not config.model.init_from:
        return spec
    for directory in (config.run_dir, Path(config.model.init_from)):
        if (directory / TOKENIZER).exists():
            return dataclasses.replace(spec, tokenizer_file=str(directory / TOKENIZER))
    return spec


def open_store(config: Config) -> TokenStore | MixtureStore:
    """The token store of a run, built when the cache has none.

    Raises:
        DataError: the corpus or its tokenizer cannot be used.
        ConfigError: the model's vocabulary has no room for the tokenizer's.
    """
    with rich_progress() as progress:
        store = prepare_corpora(corpus_spec(config), config.cache_dir, progress)
    if 0 < config.model.vocab_size < store.vocab_size:
        raise ConfigError(
            [
                f"model.vocab_size: {config.model.vocab_size} is less than the tokenizer's {store.vocab_size}; "
                "use 0 for the tokenizer's"
            ]
        )
    return store


def open_datasets(config: Config, store: TokenStore | MixtureStore) -> dict[str, TextDataset]:
    """A dataset for each split that has documents."""
    t = config.train
    return {
        split: TextDataset(store, split, t.sequence_length, t.batch, config.run.seed, config.data.packing)
        for split in SPLITS
        if store.documents(split)
    }
