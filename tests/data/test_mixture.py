"""Several corpora by weight: rows in proportion, one vocabulary, the same batches for any process count."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from data.conftest import random_texts, write_jsonl

from jax_titan.data.corpus import CorpusSpec, parse_mixture
from jax_titan.data.errors import DataError
from jax_titan.data.mixture import MixtureStore, prepare_corpora
from jax_titan.data.store import TokenStore, prepare
from jax_titan.data.text import Prefetch, TextDataset


@pytest.fixture
def mixture(tmp_path: Path) -> MixtureStore:
    """Three corpora of different alphabets and sizes, weights 6, 3 and 1."""
    parts = []
    for name, count, weight in (("a", 40, 6.0), ("b", 10, 3.0), ("c", 25, 1.0)):
        texts = [text.translate({ord(c): name for c in "abcdefghij"}) for text in random_texts(count, 60)]
        parts.append((str(write_jsonl(tmp_path / f"{name}.jsonl", texts)), weight))
    store = prepare_corpora(CorpusSpec(mixture=tuple(parts), validation_fraction=0.3), tmp_path / "cache")
    assert isinstance(store, MixtureStore)
    return store


def source_of(tokens) -> str:
    """Which corpus a row is from, by its letters; ? when it has none."""
    return next((name for name in "abc" if ord(name) in tokens), "?")


def test_rows_come_in_the_proportion_of_the_weights(mixture: MixtureStore):
    dataset = TextDataset(mixture, "train", 16, 100)
    rows = [source_of(row) for step in range(10) for row in dataset.batch(step)["tokens"]]
    known = [row for row in rows if row != "?"]
    for name, share in (("a", 0.6), ("b", 0.3), ("c", 0.1)):
        assert known.count(name) / len(known) == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("packing", ["split", "best-fit"])
def test_parts_of_any_number_join_to_the_same_batch(mixture: MixtureStore, packing):
    dataset = TextDataset(mixture, "train", 16, 12, seed=3, packing=packing)
    for step in (0, 5, 1000):
        whole = dataset.batch(step)
        for count in (1, 2, 3, 4, 6, 12):
            parts = [dataset.batch(step, (index, count)) for index in range(count)]
            for name, values in whole.items():
                assert np.array_equal(np.concatenate([part[name] for part in parts]), values)
    for whole, *parts in zip(
        dataset.eval_batches(), *(dataset.eval_batches(part=(i, 3)) for i in range(3)), strict=True
    ):
        assert np.array_equal(np.concatenate([part["tokens"] for part in parts]), whole["tokens"])


def test_a_part_is_prefetched_as_it_is(mixture: MixtureStore):
    dataset = TextDataset(mixture, "train", 16, 12)
    with Prefetch(dataset, part=(1, 3)) as prefetch:
        for step in range(3):
            assert np.array_equal(prefetch.batch(step)["tokens"], dataset.batch(step)["tokens"][4:8])


def test_parts_that_are_not_equal_are_refused(mixture: MixtureStore):
    dataset = TextDataset(mixture, "train", 16, 12)
    for part in ((0, 5), (3, 3), (0, 0)):
        with pytest.raises(DataError, match=r"train\.batch: 12 sequences have no part"):
            dataset.batch(0, part)


def test_a_batch_depends_on_seed_and_step_alone(mixture: MixtureStore):
    one, again = (TextDataset(mixture, "train", 16, 8, seed=1) for _ in range(2))
    other = TextDataset(mixture, "train", 16, 8, seed=2)
    later = again.batch(7)["tokens"]
    assert np.array_equal([one.batch(step) for step in range(8)][7]["tokens"], later)
    assert not np.array_equal(other.batch(7)["tokens"], later)


def test_every_row_of_a_corpus_comes_before_any_comes_again(mixture: MixtureStore):
    dataset = TextDataset(mixture, "train", 16, 10)
    order = [dataset._order[i] for i in range(4000)]
    for source, rows in enumerate(dataset._sources):
        drawn = [row for s, row in order if s == source]
        assert len(drawn) > rows.count
        assert sorted(drawn[: rows.count]) == list(range(rows.count))


def test_evaluation_has_every_validation_row_once_and_a_limited_one_every_corpus(mixture: MixtureStore):
    dataset = TextDataset(mixture, "validation", 16, 4)
    scored = sum(int(batch["weights"].sum()) for batch in dataset.eval_batches())
    assert scored == mixture.tokens("validation") - mixture.documents("validation")
    rows = [row for batch in dataset.eval_batches(limit=6) for row in batch["tokens"]]
    assert {source_of(row) for row in rows} >= {"a", "b", "c"}


def test_one_vocabulary_is_trained_on_all_corpora(tmp_path: Path):
    paths = [write_jsonl(tmp_path / f"{w}.jsonl", [f"{w} " * 20, f"{w}{w} " * 20]) for w in ("alpha", "omega")]
    spec = CorpusSpec(tokenizer="bpe", vocab_size=270, mixture=tuple((str(path), 1.0) for path in paths))
    store = prepare_corpora(spec, tmp_path / "cache")
    assert isinstance(store, MixtureStore)
    for word in ("alpha", "omega"):
        assert len(store.tokenizer.encode(f" {word}")) < 4
    again = prepare_corpora(spec, tmp_path / "cache")
    assert again.digest == store.digest
    assert len(list((tmp_path / "cache").glob("bpe-*"))) == 1
    assert store.unigram_nats() is not None


def test_the_digest_follows_corpora_and_shares_and_not_the_unit_of_weights(mixture: MixtureStore):
    scaled = dataclasses.replace(mixture, weights=tuple(w * 10 for w in mixture.weights))
    assert scaled.digest == mixture.digest
    assert dataclasses.replace(mixture, weights=(1.0, 1.0, 1.0)).digest != mixture.digest


def test_a_single_corpus_is_no_mixture(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    assert isinstance(prepare_corpora(CorpusSpec(str(path)), tmp_path / "cache"), TokenStore)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a.jsonl", "'a.jsonl' is not PATH=WEIGHT"),
        ("a.jsonl=1,", "'' is not PATH=WEIGHT"),
        ("=1", "'=1' is not PATH=WEIGHT"),
        ("a.jsonl=x", "a.jsonl: 'x' is not a weight; use a number above 0"),
        ("a.jsonl=0", "a.jsonl: '0' is not a weight"),
        ("a.jsonl=-1", "a.jsonl: '-1' is not a weight"),
        ("a.jsonl=inf", "a.jsonl: 'inf' is not a weight"),
        ("a.jsonl=", "a.jsonl: '' is not a weight"),
        ("a.jsonl=1,a.jsonl=2", "a.jsonl occurs twice"),
        ("nowhere=1", "nowhere does not exist"),
    ],
)
def test_a_wrong_mixture_is_one_line(text, said, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(DataError) as error:
        parse_mixture(text)
    assert str(error.value).startswith(f"data.mixture: {said}")
    assert "\n" not in str(error.value)


def test_a_path_may_hold_an_equals_sign(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "lr=3.jsonl", ["x"])
    assert parse_mixture(" lr=3.jsonl=0.5 ") == (("lr=3.jsonl", 0.5),)


def test_a_damaged_common_vocabulary_is_trained_again(tmp_path: Path):
    paths = [write_jsonl(tmp_path / f"{w}.jsonl", [f"{w} " * 20, f"{w}!"]) for w in ("alpha", "omega")]
    spec = CorpusSpec(tokenizer="bpe", vocab_size=262, mixture=tuple((str(path), 1.0) for path in paths))
    digest = prepare_corpora(spec, tmp_path / "cache").digest
    (directory,) = (tmp_path / "cache").glob("bpe-*")
    (directory / "tokenizer.json").write_text("{")
    assert prepare_corpora(spec, tmp_path / "cache").digest == digest
    assert prepare(CorpusSpec(str(paths[0])), tmp_path / "cache").digest != digest
