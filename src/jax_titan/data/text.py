"""Batches of text: a step's number in, packed rows out.

The documents of a split are one stream of tokens, end to end, and row r is tokens [r T, (r + 1) T) of it: a
row is found by arithmetic, so a batch is a pure function of (seed, step) with no iterator to save or restore.

Shapes: B sequences of a batch, T tokens of a sequence.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jax_titan.data.errors import DataError
from jax_titan.data.store import Split, TokenStore

type Batch = dict[str, np.ndarray]
"""What a model reads, each [B, T].

    tokens     int32    the input; 0 in padding
    targets    int32    the token after it, 0 where weights is 0
    segments   int32    which document of the row, from 1; 0 is padding
    positions  int32    place in the document, from the row's start if it began before; 0 in padding
    weights    float32  1 where the target belongs to the same document, else 0

An input whose next token begins another document has no target. So each token of a document but its first
(bos) is a target exactly once an epoch, in the row that holds the token before it.
"""


@dataclass(frozen=True)
class TextDataset:
    """The rows of one split of a store, cut into batches.

    Args:
        store: the tokens.
        split: "train" or "validation".
        sequence_length: T, tokens a row.
        batch_size: B, rows a batch.
        seed: of the order of rows; each epoch has its own.

    Raises:
        DataError: a length, size or seed that no batch can be made with.
    """

    store: TokenStore
    split: Split
    sequence_length: int
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise DataError(f"train.sequence_length: {self.sequence_length} is not a length; use 1 or more")
        if self.batch_size < 1:
            raise DataError(f"train.batch: {self.batch_size} is not a batch; use 1 or more")
        if self.seed < 0:
            raise DataError(f"run.seed: {self.seed} is negative; use 0 or more")

    @property
    def rows(self) -> int:
        """Rows of an epoch; the last one may be padded. 0 if the split has no documents."""
        inputs = max(self.store.tokens(self.split) - 1, 0)  # the last token has no next one
        return -(-inputs // self.sequence_length)

    def batch(self, step: int) -> Batch:
        """The batch of a step, in an order that shuffles the rows anew each epoch.

        A batch may span two epochs. Rows are the same in each epoch; their order is not.

        Args:
            step: from 0; any step, in any order.

        Returns:
            A full batch.

        Raises:
            DataError: the split has no documents, or the step is negative.
        """
        if step < 0:
            raise DataError(f"step: {step} is negative; steps count from 0")
        if not self.rows:
            raise DataError(f"data: the {self.split} split has no documents; see data.validation_fraction")
        first = step * self.batch_size
        return self._pack([self._order[first + i] for i in range(self.batch_size)])

    def eval_batches(self, limit: int = 0) -> Iterator[Batch]:
        """Every row once, in order.

        Args:
            limit: batches to stop after; 0 is all.

        Returns:
            An iterator over batches; the last is filled up with rows of padding.
        """
        batches = -(-self.rows // self.batch_size)
        for i in range(min(batches, limit) if limit else batches):
            first = i * self.batch_size
            yield self._pack(range(first, first + self.batch_size))

    def target_bytes(self, batch: Batch) -> int:
        """UTF-8 bytes of the targets that are scored: what bits per byte are divided by.

        Args:
            batch: one of this dataset's.

        Returns:
            Bytes of text; the specials have none.
        """
        return int(self.store.tokenizer.token_bytes[batch["targets"][batch["weights"] > 0]].sum())

    @cached_property
    def _order(self) -> Any:
        """Which row comes at which place of an endless sequence of epochs: computed, not stored."""
        import grain  # imports JAX

        return grain.MapDataset.range(self.rows).seed(self.seed).shuffle().repeat()

    def _pack(self, rows: list[int] | range) -> Batch:
        """Rows by number, as a batch; a number past the last row is a row of padding."""
        stream, offsets = self.store.stream(self.split), self.store.offsets(self.split)
        begin_B1 = np.asarray(rows, np.int64)[:, None] * self.sequence_length
        place_BU = begin_B1 + np.arange(self.sequence_length + 1)  # U = T + 1: the inputs, and one token more
        document_BU = np.searchsorted(offsets, place_BU, side="right") - 1
        token_BU = stream[np.minimum(place_BU, len(stream) - 1)].astype(np.int32)

        place_BT, document_BT = place_BU[:, :-1], document_BU[:, :-1]
        is_text_BT = place_BT < len(stream)
        # Past the stream's end lies a document that does not exist: the last token has no target either.
        has_target_BT = is_text_BT & (document_BU[:, 1:] == document_BT)
        position_BT = place_BT - np.maximum(offsets[document_BT], begin_B1)
        segment_BT = document_BT - document_BT[:, :1] + 1
        return {
            "tokens": np.where(is_text_BT, token_BU[:, :-1], 0),
            "targets": np.where(has_target_BT, token_BU[:, 1:], 0),
            "segments": np.where(is_text_BT, segment_BT, 0).astype(np.int32),
            "positions": np.where(is_text_BT, position_BT, 0).astype(np.int32),
            "weights": has_target_BT.astype(np.float32),
        }


class Prefetch:
    """Makes the batches of the next steps while this one is trained on; they are the same batches.

    Args:
        dataset: whose batches.
        depth: steps to be ahead; 0 makes each batch when it is asked for, without a thread.
    """

    def __init__(self, dataset: TextDataset, depth: int = 2) -> None:
        self._dataset = dataset
        self._depth = depth
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") if depth > 0 else None
        self._coming: dict[int, Future[Batch]] = {}

    def batch(self, step: int) -> Batch:
        """`TextDataset.batch(step)`, sooner if the step before was asked for; raises what that raises."""
        if self._pool is None:
            return self._dataset.batch(step)
        wanted = range(step, step + self._depth + 1)
        for other in self._coming.keys() - set(wanted):
            self._coming.pop(other).cancel()
        for ahead in wanted:
            if ahead not in self._coming:
                self._coming[ahead] = self._pool.submit(self._dataset.batch, ahead)
        return self._coming.pop(step).result()

    def close(self) -> None:
        """End the thread. A batch asked for afterwards is made at once."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            self._coming.clear()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
