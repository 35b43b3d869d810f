"""Batches of text: a step's number in, packed rows out.

A batch is a pure function of (seed, step), with no iterator to save or restore, and so is each part of it: how
many processes there are may change whenever a run is resumed. `rows` and `packing` say what a row is.

Shapes: B sequences of a batch, T tokens of a sequence.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from jax_titan.data.errors import DataError
from jax_titan.data.mixture import MixtureStore
from jax_titan.data.packing import BestFitRows
from jax_titan.data.rows import DTYPES, Batch, Rows, SplitRows
from jax_titan.data.store import Split, TokenStore

type Part = tuple[int, int]
"""(index, count): which of how many equal parts of a batch."""

_WHOLE: Part = (0, 1)


@dataclass(frozen=True)
class TextDataset:
    """The rows of one split of a store, cut into batches.

    Args:
        store: the tokens, or a mixture of stores.
        split: "train" or "validation".
        sequence_length: T, tokens a row.
        batch_size: B, rows a batch.
        seed: of the order of rows; each epoch has its own.
        packing: "split" cuts documents anywhere (`rows`), "best-fit" keeps them whole where they fit (`packing`).

    Raises:
        DataError: a length, size or seed that no batch can be made with.
    """

    store: TokenStore | MixtureStore
    split: Split
    sequence_length: int
    batch_size: int
    seed: int = 0
    packing: Literal["split", "best-fit"] = "split"

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise DataError(f"train.sequence_length: {self.sequence_length} is not a length; use 1 or more")
        if self.batch_size < 1:
            raise DataError(f"train.batch: {self.batch_size} is not a batch; use 1 or more")
        if self.seed < 0:
            raise DataError(f"run.seed: {self.seed} is negative; use 0 or more")

    @property
    def rows(self) -> int:
        """Rows of an epoch, over all corpora; some may be padded. 0 if the split has no documents."""
        return sum(rows.count for rows in self._sources)

    def batch(self, step: int, part: Part = _WHOLE) -> Batch:
        """The batch of a step, in an order that shuffles the rows anew each epoch.

        A batch may span two epochs. Rows are the same in each epoch; their order is not.

        Args:
            step: from 0; any step, in any order.
            part: which of how many equal parts, made without making the others.

        Returns:
            A full batch, or the rows of one part of it.

        Raises:
            DataError: the split has no documents, the step is negative, or the parts are not equal.
        """
        if step < 0:
            raise DataError(f"step: {step} is negative; steps count from 0")
        if not self.rows:
            raise DataError(f"data: the {self.split} split has no documents; see data.validation_fraction")
        places = step * self.batch_size + self._places(part)
        return self._pack([self._order[int(place)] for place in places])

    def eval_batches(self, limit: int = 0, part: Part = _WHOLE) -> Iterator[Batch]:
        """Every row once, in order; of a mixture each corpus evenly all along.

        Args:
            limit: batches to stop after; 0 is all.
            part: which of how many equal parts of each batch.

        Returns:
            An iterator over batches; the last is filled up with rows of padding.
        """
        order = self._eval_order
        padding = (0, self._sources[0].count)
        batches = -(-len(order) // self.batch_size)
        for i in range(min(batches, limit) if limit else batches):
            places = i * self.batch_size + self._places(part)
            yield self._pack([tuple(order[place]) if place < len(order) else padding for place in places])

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

        counts = [rows.count for rows in self._sources]
        if not isinstance(self.store, MixtureStore):
            return _Indexed(grain.MapDataset.range(counts[0]).seed(self.seed).shuffle().repeat())
        weights = self.store.weights
        known = [source for source, count in enumerate(counts) if count]
        return grain.MapDataset.mix(
            [
                grain.MapDataset.range(counts[source])
                .seed((self.seed + source) % 2**32)
                .shuffle()
                .map(lambda row, source=source: (source, row))
                .repeat()
                for source in known
            ],
            [weights[source] for source in known],
        )

    @cached_property
    def _sources(self) -> list[Rows]:
        stores = self.store.stores if isinstance(self.store, MixtureStore) else [self.store]
        kind = BestFitRows if self.packing == "best-fit" else SplitRows
        return [kind(store, self.split, self.sequence_length) for store in stores]

    @cached_property
    def _eval_order(self) -> np.ndarray:
        """(source, row) of every row: those of each source in order, spread evenly over the whole."""
        counts = [rows.count for rows in self._sources]
        source = np.repeat(np.arange(len(counts)), counts)
        row = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort((row + 0.5) / np.repeat(counts, counts), kind="stable")
        return np.stack([source, row], axis=1)[order]

    def _places(self, part: Part) -> np.ndarray:
        index, count = part
        if count < 1 or self.batch_size % count or not 0 <= index < count:
            raise DataError(
                f"train.batch: {self.batch_size} sequences have no part {index} of {count} equal ones; use a "
                "batch that the number of processes divides"
            )
        size = self.batch_size // count
        return np.arange(index * size, (index + 1) * size)

    def _pack(self, rows: list[tuple[int, int]]) -> Batch:
        """Rows by (source, number), as a batch; a number past the last is a row of padding."""
        sources, numbers = np.array(rows, np.int64).reshape(-1, 2).T
        if len(self._sources) == 1:
            return self._sources[0].pack(numbers)
        batch = {name: np.empty((len(rows), self.sequence_length), dtype) for name, dtype in DTYPES.items()}
        for source in np.unique(sources):
            here = sources == source
            for name, values in self._sources[source].pack(numbers[here]).items():
                batch[name][here] = values
        return batch


@dataclass(frozen=True)
class _Indexed:
    """The rows of a single source, as (source, row) like those of a mixture."""

    rows: Any

    def __getitem__(self, place: int) -> tuple[int, int]:
        return 0, int(self.rows[place])


class Prefetch:
    """Makes the batches of the next steps while this one is trained on; they are the same batches.

    Args:
        dataset: whose batches.
        depth: steps to be ahead; 0 makes each batch when it is asked for, without a thread.
        part: which of how many equal parts of each batch.
    """

    def __init__(self, dataset: TextDataset, depth: int = 2, part: Part = _WHOLE) -> None:
        self._make = dataset.batch if part == _WHOLE else partial(dataset.batch, part=part)
        self._depth = depth
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") if depth > 0 else None
        self._coming: dict[int, Future[Batch]] = {}

    def batch(self, step: int) -> Batch:
        """`TextDataset.batch(step)`, sooner if the step before was asked for; raises what that raises."""
        if self._pool is None:
            return self._make(step)
        wanted = range(step, step + self._depth + 1)
        for other in self._coming.keys() - set(wanted):
            self._coming.pop(other).cancel()
        for ahead in wanted:
            if ahead not in self._coming:
                self._coming[ahead] = self._pool.submit(self._make, ahead)
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
