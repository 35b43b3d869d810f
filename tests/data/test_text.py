import hashlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_titan.data.errors import DataError
from jax_titan.data.store import CorpusSpec, TokenStore, open_store, prepare
from jax_titan.data.text import Batch, Prefetch, TextDataset

from .conftest import random_texts, write_jsonl

KEYS = ["tokens", "targets", "segments", "positions", "weights"]
LENGTHS = [1, 2, 7, 16, 100, 100_000]


def rows_of(dataset: TextDataset) -> list[dict[str, np.ndarray]]:
    """Every row of an epoch, in order."""
    rows = [{k: batch[k][i] for k in KEYS} for batch in dataset.eval_batches() for i in range(dataset.batch_size)]
    return rows[: dataset.rows]


def expected_rows(store: TokenStore, split: Any, length: int) -> list[dict[str, list[int]]]:
    """The rows by a walk over the documents, a token at a time."""
    rows: list[dict[str, list[int]]] = []
    used = 0
    total = store.tokens(split)
    for d in range(store.documents(split)):
        document = store.document(split, d).tolist()
        for i, token in enumerate(document):
            if used == total - 1 and used % length == 0:
                break  # the last token of all, alone in a row: nothing follows it
            if used % length == 0:
                rows.append({k: [] for k in KEYS})
                segment, position = 0, 0
            if i == 0 or used % length == 0:
                segment, position = segment + 1, 0
            row, has_next = rows[-1], i + 1 < len(document)
            row["tokens"].append(token)
            row["targets"].append(document[i + 1] if has_next else 0)
            row["weights"].append(int(has_next))
            row["segments"].append(segment)
            row["positions"].append(position)
            position += 1
            used += 1
    for row in rows:
        for values in row.values():
            values.extend([0] * (length - len(values)))
    return rows


def same(one: Batch, two: Batch) -> bool:
    return list(one) == list(two) and all(np.array_equal(one[k], two[k]) for k in one)


@pytest.mark.parametrize("length", LENGTHS)
def test_rows_are_those_of_a_walk_over_the_documents(store: TokenStore, length: int):
    dataset = TextDataset(store, "validation", length, 3)
    expected = expected_rows(store, "validation", length)
    rows = rows_of(dataset)
    assert len(rows) == len(expected) == dataset.rows
    for row, wanted in zip(rows, expected, strict=True):
        for key in KEYS:
            np.testing.assert_array_equal(row[key], wanted[key], err_msg=key)


def test_batches_have_the_stated_shapes_and_types(store: TokenStore):
    batch = TextDataset(store, "train", 32, 5).batch(3)
    assert list(batch) == KEYS
    assert all(batch[key].shape == (5, 32) for key in KEYS)
    assert [batch[key].dtype.name for key in KEYS] == ["int32"] * 4 + ["float32"]


@pytest.mark.parametrize("length", LENGTHS)
def test_documents_come_back_from_rows(store: TokenStore, length: int):
    rows = rows_of(TextDataset(store, "train", length, 4))
    tokens = np.concatenate([row["tokens"][row["segments"] > 0] for row in rows])
    stream = store.stream("train")
    if len(tokens) < len(stream):  # the last token of all is only a target if it would be alone in a row
        tokens = np.append(tokens, rows[-1]["targets"][-1])
    np.testing.assert_array_equal(tokens, stream)


@pytest.mark.parametrize("length", LENGTHS)
def test_each_token_but_the_first_of_a_document_is_a_target_once_an_epoch(store: TokenStore, length: int):
    rows = rows_of(TextDataset(store, "train", length, 4))
    scored = np.concatenate([row["targets"][row["weights"] > 0] for row in rows])
    documents = [store.document("train", i)[1:] for i in range(store.documents("train"))]
    np.testing.assert_array_equal(scored, np.concatenate(documents))


def test_a_target_is_the_next_token_of_the_same_segment(store: TokenStore):
    for row in rows_of(TextDataset(store, "train", 50, 4)):
        inner = (row["segments"][:-1] == row["segments"][1:]) & (row["segments"][1:] > 0)
        np.testing.assert_array_equal(row["weights"][:-1], inner)
        np.testing.assert_array_equal(row["targets"][:-1][inner], row["tokens"][1:][inner])
        assert (row["targets"][row["weights"] == 0] == 0).all()
        assert store.tokenizer.bos not in row["targets"]


def test_positions_restart_with_each_document_and_each_row(store: TokenStore):
    for row in rows_of(TextDataset(store, "train", 50, 4)):
        for segment in range(1, row["segments"].max() + 1):
            positions = row["positions"][row["segments"] == segment]
            np.testing.assert_array_equal(positions, np.arange(len(positions)))
        assert row["segments"][0] == 1
        assert set(np.diff(row["segments"][row["segments"] > 0])) <= {0, 1}
        starts = row["tokens"] == store.tokenizer.bos
        assert (row["positions"][starts] == 0).all()


def test_evaluation_fills_its_last_batch_with_rows_of_weight_zero(store: TokenStore):
    dataset = TextDataset(store, "validation", 16, 7)
    batches = list(dataset.eval_batches())
    assert len(batches) == -(-dataset.rows // 7)
    filler = dataset.rows % 7 - 7
    assert -7 < filler < 0
    for key in KEYS:
        assert batches[-1][key].shape == (7, 16)
        assert not batches[-1][key][filler:].any()
    assert batches[-1]["segments"][filler - 1, 0] == 1


def test_evaluation_stops_at_its_limit(store: TokenStore):
    dataset = TextDataset(store, "validation", 16, 2)
    every = list(dataset.eval_batches())
    assert all(same(one, two) for one, two in zip(dataset.eval_batches(3), every[:3], strict=True))
    assert len(list(dataset.eval_batches(10**9))) == len(every) > 3


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_each_epoch_is_a_permutation_of_the_rows_and_another_one(store: TokenStore, batch_size: int):
    dataset = TextDataset(store, "train", 16, batch_size, seed=3)
    n = dataset.rows
    wanted = sorted(row["tokens"].tobytes() for row in rows_of(dataset))
    steps = -(-3 * n // batch_size)
    stream = [row.tobytes() for step in range(steps) for row in dataset.batch(step)["tokens"]]
    epochs = [stream[i * n : (i + 1) * n] for i in range(3)]
    assert all(sorted(epoch) == wanted for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_batch_larger_than_the_epoch_goes_on_with_the_next(tmp_path: Path):
    corpus = write_jsonl(tmp_path / "c.jsonl", ["ab", "cd"])
    dataset = TextDataset(prepare(CorpusSpec(str(corpus)), tmp_path / "cache"), "train", 8, 5)
    assert dataset.rows == 1
    batch = dataset.batch(0)
    assert (batch["tokens"] == batch["tokens"][0]).all()


def test_a_batch_depends_on_seed_and_step_alone(store: TokenStore):
    steps = [0, 5, 3, 3, 10**6, 10**12, 0, 1]
    dataset = TextDataset(store, "train", 16, 4, seed=9)
    seen = {step: dataset.batch(step) for step in steps}
    for step in reversed(steps):
        fresh = TextDataset(open_store(store.directory), "train", 16, 4, seed=9)
        assert same(fresh.batch(step), seen[step])
        assert same(dataset.batch(step), seen[step])


def test_another_process_makes_the_same_batch(store: TokenStore):
    script = (
        "import hashlib, sys\n"
        "from jax_titan.data.store import open_store\n"
        "from jax_titan.data.text import TextDataset\n"
        "batch = TextDataset(open_store(sys.argv[1]), 'train', 16, 4, seed=9).batch(12345)\n"
        "print(hashlib.sha256(b''.join(batch[k].tobytes() for k in batch)).hexdigest())\n"
    )
    command = [sys.executable, "-c", script, str(store.directory)]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    batch = TextDataset(store, "train", 16, 4, seed=9).batch(12345)
    assert hashlib.sha256(b"".join(batch[k].tobytes() for k in batch)).hexdigest() == other


def test_seeds_give_different_orders(store: TokenStore):
    orders = {
        b"".join(TextDataset(store, "train", 16, 4, seed=seed).batch(s)["tokens"].tobytes() for s in range(5))
        for seed in (0, 1, 2, 7, 2**31, 2**40)
    }
    assert len(orders) == 6


def test_the_batch_size_only_cuts_the_same_order(store: TokenStore):
    small = TextDataset(store, "train", 16, 2, seed=1)
    large = TextDataset(store, "train", 16, 6, seed=1)
    for key in KEYS:
        three = np.concatenate([small.batch(step)[key] for step in (3, 4, 5)])
        np.testing.assert_array_equal(large.batch(1)[key], three)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_target_bytes_of_an_epoch_are_the_bytes_of_the_text(kind, tmp_path: Path):
    corpus = write_jsonl(tmp_path / "c.jsonl", random_texts(40, 60, seed=5))
    store = prepare(CorpusSpec(str(corpus), kind, 290, validation_fraction=0.3), tmp_path / "cache")
    dataset = TextDataset(store, "validation", 16, 4)
    total = sum(dataset.target_bytes(batch) for batch in dataset.eval_batches())
    assert total == store.meta.splits["validation"].text_bytes


def test_a_split_without_documents_has_no_batches(corpus: Path, tmp_path: Path):
    store = prepare(CorpusSpec(str(corpus), validation_fraction=0), tmp_path / "cache")
    dataset = TextDataset(store, "validation", 16, 4)
    assert dataset.rows == 0
    assert list(dataset.eval_batches()) == []
    with pytest.raises(DataError, match=r"validation split has no documents; see data\.validation_fraction"):
        dataset.batch(0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 4, 0), r"train\.sequence_length: 0"),
        ((16, 0, 0), r"train\.batch: 0"),
        ((16, 4, -1), r"run\.seed: -1 is negative"),
    ],
)
def test_sizes_that_make_no_batch_are_refused(arguments: tuple[int, int, int], said: str, store: TokenStore):
    with pytest.raises(DataError, match=said):
        TextDataset(store, "train", *arguments)


def test_a_negative_step_is_refused(store: TokenStore):
    with pytest.raises(DataError, match="step: -1 is negative"):
        TextDataset(store, "train", 16, 4).batch(-1)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetching_changes_no_batch(store: TokenStore, depth: int):
    dataset = TextDataset(store, "train", 16, 4, seed=2)
    with Prefetch(dataset, depth) as prefetch:
        for step in [0, 1, 2, 3, 9, 10, 4, 4, 5, 0]:
            assert same(prefetch.batch(step), dataset.batch(step))


class Scripted:
    """Stands for a dataset: notes the steps it is asked for, and fails at step 2, once."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.threads: set[str] = set()
        self.ready = threading.Condition()
        self.failed = False

    def batch(self, step: int) -> Batch:
        with self.ready:
            self.made.append(step)
            self.threads.add(threading.current_thread().name)
            self.ready.notify_all()
        if step == 2 and not self.failed:
            self.failed = True
            raise OSError("disk gone")
        return {"step": np.array(step)}


def test_prefetching_makes_the_next_batches_before_they_are_asked_for():
    dataset: Any = Scripted()
    with Prefetch(dataset, depth=3) as prefetch:
        prefetch.batch(10)
        with dataset.ready:
            assert dataset.ready.wait_for(lambda: dataset.made == [10, 11, 12, 13], timeout=10)
    assert threading.current_thread().name not in dataset.threads


def test_a_jump_drops_the_batches_that_were_made_ahead():
    dataset: Any = Scripted()
    with Prefetch(dataset, depth=1) as prefetch:
        prefetch.batch(10)
        with dataset.ready:
            assert dataset.ready.wait_for(lambda: 11 in dataset.made, timeout=10)
        prefetch.batch(20)
        prefetch.batch(11)
    assert dataset.made.count(11) == 2


def test_a_failure_ahead_of_time_surfaces_at_its_step_and_may_be_retried():
    dataset: Any = Scripted()
    with Prefetch(dataset, depth=2) as prefetch:
        assert prefetch.batch(0)["step"] == 0
        assert prefetch.batch(1)["step"] == 1
        with pytest.raises(OSError, match="disk gone"):
            prefetch.batch(2)
        assert prefetch.batch(2)["step"] == 2


def test_a_closed_prefetch_has_no_thread_and_still_makes_batches(store: TokenStore):
    prefetch = Prefetch(TextDataset(store, "train", 16, 4), depth=2)
    prefetch.batch(0)
    prefetch.close()
    prefetch.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]
    assert same(prefetch.batch(1), TextDataset(store, "train", 16, 4).batch(1))
