"""Best-fit packing: documents stay whole where they fit, at the price of some padding.

Rows are planned once for a split and a row length, by best-fit-decreasing, and saved as a table beside the token
store. A document longer than a row is cut into full rows and a rest; rests and short documents, the longest first,
each go to the fullest row that has room.

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830), section 3.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from jax_titan.data.cache import building, discard, flush
from jax_titan.data.errors import DataError
from jax_titan.data.rows import DTYPES, Batch
from jax_titan.data.store import Split, TokenStore

FORMAT = 1
"""Version of the table and of the plan; a table of another version is not reused."""


@dataclass(frozen=True)
class Table:
    """Which pieces of documents each row holds.

    Args:
        begins: int64 [rows + 1], where each row's pieces begin in the two others, then the end.
        places: int64 [pieces], where a piece's first input lies in the stream.
        lengths: int32 [pieces], its inputs; the target of the last one is the token after it.
    """

    begins: np.ndarray
    places: np.ndarray
    lengths: np.ndarray

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.begins) - 1


def plan(offsets: np.ndarray, sequence_length: int) -> Table:
    """Pack documents into rows.

    Args:
        offsets: where each document begins in the stream, then the end: int64 [documents + 1].
        sequence_length: inputs of a row, T.

    Returns:
        Full rows first, then the others as they were opened. The same documents give the same table.
    """
    T = sequence_length
    inputs = np.diff(np.asarray(offsets)) - 1  # the last token of a document is only a target
    full, rest = inputs // T, inputs % T
    begins_of = np.asarray(offsets)[:-1]
    document = np.repeat(np.arange(len(full)), full)
    within = np.arange(len(document)) - np.repeat(np.cumsum(full) - full, full)
    full_places = begins_of[document] + within * T

    has_rest = np.flatnonzero(rest)
    rest_places, rest_lengths = (begins_of + full * T)[has_rest], rest[has_rest]
    order = np.argsort(-rest_lengths, kind="stable")
    rest_places, rest_lengths = rest_places[order], rest_lengths[order]
    row_of, at = _best_fit(rest_lengths, T)

    rows = np.concatenate([np.arange(len(full_places)), row_of + len(full_places)])
    starts = np.concatenate([np.zeros(len(full_places), np.int64), at])
    places = np.concatenate([full_places, rest_places])
    lengths = np.concatenate([np.full(len(full_places), T), rest_lengths])
    order = np.lexsort((starts, rows))
    count = int(rows.max()) + 1 if len(rows) else 0
    begins = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=count), out=begins[1:])
    return Table(begins, places[order].astype(np.int64), lengths[order].astype(np.int32))


def _best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Each piece into the fullest row that has room for it, a length at a time rather than a piece at a time.

    Of pieces of one length, the first goes to the fullest row with room, the next to the same row while it still
    fits, for that row is then fuller than any other: so a row takes as many as fit before the next row is looked
    at, and all rows with the same room are served alike.

    Args:
        lengths: descending, each between 1 and `capacity`.
        capacity: of a row.

    Returns:
        The row of each piece and where it begins there.
    """
    row_of, at = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    by_room: dict[int, list[np.ndarray]] = {}  # rows by the room that they have left
    rooms = np.zeros(capacity + 1, bool)  # which keys `by_room` has
    opened = 0
    values, firsts, counts = np.unique(-lengths, return_index=True, return_counts=True)
    for length, first, count in zip(-values, firsts, counts, strict=True):
        length, first, count = int(length), int(first), int(count)
        while count:
            room = length + int(np.argmax(rooms[length:]))
            if not rooms[room]:  # none has any: new rows
                room = capacity
                needed = -(-count // (capacity // length))
                candidates = np.arange(opened, opened + needed)
                opened += needed
            else:
                parts = by_room.pop(room)
                rooms[room] = False
                candidates = np.concatenate(parts) if len(parts) > 1 else parts[0]
            each = room // length
            served = min(len(candidates), -(-count // each))
            placed = min(count, served * each)
            piece = np.arange(placed)
            row_of[first : first + placed] = candidates[piece // each]
            at[first : first + placed] = capacity - room + piece % each * length
            whole = placed // each
            _keep(by_room, rooms, room - each * length, candidates[:whole])
            _keep(by_room, rooms, room - (placed - whole * each) * length, candidates[whole:served])
            _keep(by_room, rooms, room, candidates[served:])
            first, count = first + placed, count - placed
    return row_of, at


def _keep(by_room: dict[int, list[np.ndarray]], rooms: np.ndarray, room: int, rows: np.ndarray) -> None:
    if room and len(rows):
        by_room.setdefault(room, []).append(rows)
        rooms[room] = True


@dataclass(frozen=True)
class BestFitRows:
    """Rows of whole documents and of pieces of long ones.

    Args:
        store: the tokens.
        split: "train" or "validation".
        sequence_length: T.
    """

    store: TokenStore
    split: Split
    sequence_length: int

    @property
    def count(self) -> int:
        return self.table.rows

    @cached_property
    def table(self) -> Table:
        """From the cache, or planned and saved into it."""
        what = [FORMAT, self.store.digest, self.split, self.sequence_length]
        digest = xxhash.xxh3_128_hexdigest(json.dumps(what).encode())
        directory = self.store.directory.parent / f"rows-{digest}"
        try:
            if directory.exists():
                try:
                    return _open(directory, self.store.tokens(self.split))
                except (OSError, ValueError, KeyError):
                    discard(directory)
            with building(directory) as temporary:
                _save(temporary, plan(self.store.offsets(self.split), self.sequence_length))
            return _open(directory, self.store.tokens(self.split))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"data.cache: {directory.parent} cannot hold the table of packed rows ({error}); free space there "
                "or name a directory that can be written"
            ) from error

    def pack(self, rows: np.ndarray) -> Batch:
        B, T = len(rows), self.sequence_length
        table, stream = self.table, self.store.stream(self.split)
        flat = {name: np.zeros(B * T, dtype) for name, dtype in DTYPES.items()}
        real = np.flatnonzero(np.asarray(rows) < table.rows)
        begins, ends = table.begins[rows[real]], table.begins[rows[real] + 1]
        counts = ends - begins
        row = np.repeat(real, counts)  # of each piece
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        piece = np.repeat(begins, counts) + number
        lengths = table.lengths[piece].astype(np.int64)
        start = np.cumsum(lengths) - lengths
        start -= np.repeat(start[np.cumsum(counts) - counts], counts)  # in its row, not in the batch

        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        here = np.repeat(row * T + start, lengths) + within
        place = np.repeat(table.places[piece], lengths) + within
        document = np.searchsorted(self.store.offsets(self.split), place, side="right") - 1
        flat["tokens"][here] = stream[place]
        flat["targets"][here] = stream[place + 1]
        flat["segments"][here] = np.repeat(number + 1, lengths)
        flat["positions"][here] = within
        flat["weights"][here] = self.store.is_scored(self.split, place + 1, document)
        return {name: values.reshape(B, T) for name, values in flat.items()}


_FILES = ("begins", "places", "lengths")


def _save(directory: Path, table: Table) -> None:
    digests = {}
    for name in _FILES:
        path = directory / f"{name}.npy"
        with path.open("wb") as file:
            np.save(file, getattr(table, name))
            flush(file)
        digests[name] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    with (directory / "meta.json").open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "xxh3_128": digests}, file)
        flush(file)


def _open(directory: Path, tokens: int) -> Table:
    digests = json.loads((directory / "meta.json").read_text(encoding="utf-8"))["xxh3_128"]
    arrays = {}
    for name in _FILES:
        path = directory / f"{name}.npy"
        if xxhash.xxh3_128_hexdigest(path.read_bytes()) != digests[name]:
            raise ValueError(f"{path} has changed")
        arrays[name] = np.load(path, mmap_mode="r")
    table = Table(**arrays)
    if len(table.places) and int(table.places.max()) >= tokens:
        raise ValueError(f"{directory} is of another store")
    return table
