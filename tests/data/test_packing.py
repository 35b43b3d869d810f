"""Best-fit packing: nothing lost, nothing over, little padding, planned once."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from data.conftest import random_texts, write_jsonl

from jax_titan.data.packing import BestFitRows, plan
from jax_titan.data.store import CorpusSpec, TokenStore, prepare
from jax_titan.data.text import TextDataset


def offsets_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)])


def naive_best_fit(lengths, capacity):
    """One piece at a time into the fullest row with room; returns the rooms left, by row."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(capacity - length)
    return rooms


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("T", [1, 2, 7, 16, 100])
def test_every_input_is_in_one_row_once_and_no_row_is_over(seed, T):
    lengths = np.random.default_rng(seed).integers(2, 3 * T + 3, 60)
    table = plan(offsets_of(lengths), T)
    inputs = np.concatenate(
        [np.arange(p, p + n) for p, n in zip(table.places, table.lengths, strict=True)] or [[]]
    )
    ends = offsets_of(lengths)[1:] - 1
    expected = np.setdiff1d(np.arange(lengths.sum()), ends)
    assert sorted(inputs) == list(expected)
    for row in range(table.rows):
        assert 1 <= table.lengths[table.begins[row] : table.begins[row + 1]].sum() <= T
    documents = np.searchsorted(offsets_of(lengths), table.places, side="right") - 1
    assert np.all(table.places + table.lengths <= ends[documents])  # no piece reaches into another document


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("T", [5, 16, 64])
def test_the_rows_are_as_full_as_when_pieces_are_placed_one_at_a_time(seed, T):
    lengths = np.random.default_rng(seed).integers(2, T + 2, 200)
    table = plan(offsets_of(lengths), T)
    filled = [table.lengths[a:b].sum() for a, b in zip(table.begins[:-1], table.begins[1:], strict=True)]
    assert sorted(T - n for n in filled) == sorted(naive_best_fit(lengths - 1, T))


def test_a_document_that_fits_is_never_cut():
    lengths = np.random.default_rng(0).integers(2, 40, 300)
    table = plan(offsets_of(lengths), 32)
    short = offsets_of(lengths)[:-1][lengths - 1 <= 32]
    whole = dict(zip(table.places, table.lengths, strict=True))
    assert all(
        whole[place] == lengths[i] - 1 for place, i in zip(short, np.flatnonzero(lengths - 1 <= 32), strict=True)
    )


def test_a_million_documents_are_planned_in_seconds_with_little_padding():
    lengths = np.clip(np.random.default_rng(0).lognormal(6.0, 1.3, 1_000_000), 2, 100_000).astype(np.int64)
    start = time.process_time()
    table = plan(offsets_of(lengths), 2048)
    assert time.process_time() - start < 30
    assert (lengths - 1).sum() > 0.99 * table.rows * 2048


def test_without_documents_there_are_no_rows():
    assert plan(np.array([0]), 8).rows == 0
    assert plan(np.array([0, 1]), 8).rows == 0  # a single token has no target


@pytest.mark.parametrize("T", [3, 8, 50])
def test_a_packed_batch_says_what_its_rows_hold(store: TokenStore, T: int):
    dataset = TextDataset(store, "train", T, 4, packing="best-fit")
    stream, offsets = store.stream("train"), store.offsets("train")
    seen = np.zeros(len(stream), int)
    for batch in dataset.eval_batches():
        for b in range(4):
            segments = batch["segments"][b]
            assert np.all(np.diff(segments[segments > 0]) >= 0)
            for segment in range(1, segments.max() + 1):
                here = segments == segment
                tokens = batch["tokens"][b][here]
                positions = batch["positions"][b][here]
                assert list(positions) == list(range(len(tokens)))
                targets = batch["targets"][b][here]
                assert np.array_equal(tokens[1:], targets[:-1])
                assert np.all(batch["weights"][b][here] == 1)
            assert np.all(batch["weights"][b][segments == 0] == 0)
            assert np.all(batch["tokens"][b][segments == 0] == 0)
    rows = BestFitRows(store, "train", T)
    for place, length in zip(rows.table.places, rows.table.lengths, strict=True):
        seen[place + 1 : place + length + 1] += 1
    assert np.array_equal(seen, np.isin(np.arange(len(stream)), offsets[:-1], invert=True))


def test_both_packings_score_the_same_targets(store: TokenStore):
    counts = []
    for packing in ("split", "best-fit"):
        dataset = TextDataset(store, "train", 16, 4, packing=packing)
        targets = [b["targets"][b["weights"] > 0] for b in dataset.eval_batches()]
        counts.append(np.bincount(np.concatenate(targets), minlength=store.vocab_size))
    assert np.array_equal(*counts)


def test_the_table_is_read_back_and_a_damaged_one_is_made_again(store: TokenStore):
    first = BestFitRows(store, "train", 16)
    expected = np.array(first.table.places)
    (directory,) = store.directory.parent.glob("rows-*")
    before = (directory / "meta.json").stat().st_mtime_ns
    assert np.array_equal(BestFitRows(store, "train", 16).table.places, expected)
    assert (directory / "meta.json").stat().st_mtime_ns == before
    path = directory / "places.npy"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert np.array_equal(BestFitRows(store, "train", 16).table.places, expected)
    shutil.rmtree(directory)
    assert np.array_equal(BestFitRows(store, "train", 16).table.places, expected)


def test_packing_pads_less_than_a_row_for_each_document(tmp_path: Path):
    path = write_jsonl(tmp_path / "corpus.jsonl", random_texts(200, 30))
    store = prepare(CorpusSpec(str(path), validation_fraction=0), tmp_path / "cache")
    assert TextDataset(store, "train", 64, 4, packing="best-fit").rows < store.documents("train") / 1.5
