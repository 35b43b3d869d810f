"""Prompts are read and not scored: for fine-tuning on prompt/completion pairs."""

import json
from pathlib import Path

import numpy as np
import pytest
from data.conftest import random_texts

from jax_titan.data.corpus import CorpusSpec
from jax_titan.data.errors import DataError
from jax_titan.data.store import TokenStore, prepare
from jax_titan.data.text import TextDataset


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> Path:
    lines = (json.dumps({"prompt": prompt, "completion": text}) for prompt, text in pairs)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def store_of(path: Path, cache: Path, **changes) -> TokenStore:
    options = {"text_field": "completion", "prompt_field": "prompt", "validation_fraction": 0.0} | changes
    return prepare(CorpusSpec(str(path), **options), cache)


@pytest.fixture
def pairs() -> list[tuple[str, str]]:
    prompts = ["", *random_texts(39, 30, seed=1)]
    return list(zip(prompts, random_texts(40, 40, seed=2), strict=True))


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("packing", ["split", "best-fit"])
@pytest.mark.parametrize("T", [5, 16, 200])
def test_only_completions_and_their_ends_are_scored(kind, packing, T, pairs, tmp_path: Path):
    path = write_pairs(tmp_path / "pairs.jsonl", pairs)
    store = store_of(path, tmp_path / "cache", tokenizer=kind, vocab_size=280)
    encode, eos = store.tokenizer.encode, store.tokenizer.eos
    expected = sorted(token for _, text in pairs for token in [*encode(text), eos])
    dataset = TextDataset(store, "train", T, 4, packing=packing)
    batches = list(dataset.eval_batches())
    scored = np.concatenate([b["targets"][b["weights"] > 0] for b in batches])
    assert sorted(scored) == expected
    unscored = np.concatenate([b["targets"][(b["weights"] == 0) & (b["targets"] > 0)] for b in batches])
    prompts = sorted(token for prompt, _ in pairs for token in encode(prompt) if token)
    assert sorted(unscored) == prompts


def test_a_document_is_its_prompt_then_its_completion(pairs, tmp_path: Path):
    store = store_of(write_pairs(tmp_path / "pairs.jsonl", pairs), tmp_path / "cache")
    for i, (prompt, text) in enumerate(pairs):
        assert store.tokenizer.decode(store.document("train", i)) == prompt + text


def test_the_unigram_loss_counts_what_is_scored(pairs, tmp_path: Path):
    path = write_pairs(tmp_path / "pairs.jsonl", pairs)
    store = store_of(path, tmp_path / "cache", validation_fraction=0.3)

    def counts(split):
        dataset = TextDataset(store, split, 64, 2)
        targets = [b["targets"][b["weights"] > 0] for b in dataset.eval_batches()]
        return np.bincount(np.concatenate(targets), minlength=store.vocab_size)

    train, validation = counts("train"), counts("validation")
    log_p = np.log((train + 1) / (train.sum() + store.vocab_size))
    assert store.unigram_nats() == pytest.approx(-(validation * log_p).sum() / validation.sum())


def test_the_digest_knows_the_prompt_field(pairs, tmp_path: Path):
    path = write_pairs(tmp_path / "pairs.jsonl", pairs)
    with_prompt = store_of(path, tmp_path / "cache")
    assert store_of(path, tmp_path / "cache", prompt_field="").digest != with_prompt.digest


def test_what_has_no_prompt_is_named(pairs, tmp_path: Path):
    (tmp_path / "plain.txt").write_text("text")
    with pytest.raises(DataError, match=r"data\.prompt_field: .*plain\.txt is plain text and has no fields"):
        store_of(tmp_path / "plain.txt", tmp_path / "cache")
    (tmp_path / "a.jsonl").write_text('{"completion": "x"}\n')
    with pytest.raises(
        DataError, match=r"data\.prompt_field: .*a\.jsonl line 1 has no field 'prompt'; it has: completion"
    ):
        store_of(tmp_path / "a.jsonl", tmp_path / "cache")
    (tmp_path / "b.jsonl").write_text('{"completion": "x", "prompt": 3}\n')
    with pytest.raises(DataError, match=r"data\.prompt_field: .*line 1: 'prompt' is a number, not a text"):
        store_of(tmp_path / "b.jsonl", tmp_path / "cache")


def test_a_single_pair_is_not_cut_for_validation(tmp_path: Path):
    path = write_pairs(tmp_path / "pairs.jsonl", [("question", "answer")])
    with pytest.raises(DataError, match="a single document with a prompt, which cannot be cut in two"):
        store_of(path, tmp_path / "cache", validation_fraction=0.1)
    assert store_of(path, tmp_path / "cache").documents("train") == 1
