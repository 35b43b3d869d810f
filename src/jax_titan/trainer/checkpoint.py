"""Checkpoints: parameters and optimizer state by unit name, so that one does not depend on how the model was cut.

Orbax writes and reads them. A save returns when its caller may overwrite the arrays, and goes on in the
background; its directory gets its name, the step, when all is on disk: a half-written one is never taken for one.
Arrays are not compressed (random weights do not compress, and trying costs several CPU-seconds a gigabyte), and
stored in tiles, so that a layout which shards them otherwise reads hardly more than its shards.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jax_titan.trainer.errors import CheckpointError

_ITEM = "state"
_UNFINISHED = ".orbax-checkpoint-tmp"  # ends the name of a directory that is not committed
_TILE_BYTES = 4 * 2**20
_IN_FLIGHT_BYTES = 128 * 2**20
_PATIENCE_SECONDS = 7 * 24 * 3600  # by itself Orbax gives up after 20 minutes, which a slow disk may well need


@dataclasses.dataclass(frozen=True)
class Saved:
    """A committed checkpoint.

    Attributes:
        step: the state is that after this step.
        blocking_seconds: how long `save` held its caller, the wait for an earlier save included.
        seconds: from the call of `save` to the commit.
        bytes: on disk; None when they cannot be counted.
        path: its directory.
    """

    step: int
    blocking_seconds: float
    seconds: float
    bytes: int | None
    path: Path


class Checkpoints:
    """The checkpoints of one run. Only `save` changes anything on disk: a reader disturbs no writer.

    Args:
        directory: where they are kept, one folder a step.
        keep: how many of the latest stay; None all.
        asynchronous: write while the caller goes on. The host holds a copy of the state until it is written; on
            CPU that is the old arrays, beside which a step makes new ones.
    """

    def __init__(self, directory: Path, keep: int | None, asynchronous: bool = True):
        # Orbax tells its inner life, and every failure several times with its stack.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        self.directory = directory
        self._keep = keep
        self._asynchronous = asynchronous
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._in_flight: Future[Saved | CheckpointError] | None = None
        self._committed: list[Saved] = []
        self._failures: list[CheckpointError] = []
        self._known: dict[int, Any] = {}  # metadata by step: reading it takes over a millisecond an array

    @property
    def latest_step(self) -> int | None:
        """The newest committed step, or None."""
        return max(self._steps(), default=None)

    def save(self, step: int, params: Any, optimizer: Any, facts: dict[str, Any]) -> None:
        """Write the state after `step`. Returns once its arrays may be donated or overwritten, or, when not
        asynchronous, once it is committed.

        One save is in flight at a time: an earlier one is waited for, and `finished` tells how it went.

        Args:
            params, optimizer: by unit name.
            facts: small JSON facts to keep beside it, such as digests.

        Raises:
            CheckpointError: this save failed before it could go on in the background.
        """
        started = time.monotonic()
        self._collect(wait=True)
        state = {"params": params, "optimizer": optimizer}
        self._known.pop(step, None)
        try:
            self._make_room(sum(_sizes(state)))
            with _context(state):
                response = ocp.save_checkpointables_async(
                    self._place(step), {_ITEM: state}, custom_metadata=facts, overwrite=True
                )
        except Exception as error:
            raise self._not_saved(step, error) from error
        blocking_seconds = time.monotonic() - started
        self._in_flight = self._background.submit(self._commit, response, step, started, blocking_seconds)
        if not self._asynchronous:
            self._collect(wait=True)
            if self._failures:
                raise self._failures.pop()

    def finished(self, wait: bool = False) -> list[Saved]:
        """The saves that were committed since the last call, oldest first.

        Args:
            wait: for the one in flight.

        Raises:
            CheckpointError: one of them failed. The next call tells the others; earlier checkpoints are untouched.
        """
        self._collect(wait)
        if self._failures:
            raise self._failures.pop(0)
        committed, self._committed = self._committed, []
        return committed

    def close(self) -> None:
        """Wait for the save in flight; `finished` tells how it went."""
        self._background.shutdown()

    def facts(self, step: int) -> dict[str, Any]:
        """What `save` was told beside the state.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        kept = self._metadata(step).custom_metadata
        if not kept:
            raise self._unreadable(step, "it has no metadata")
        return dict(kept)

    def shapes(self, step: int) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Shapes of the parameters by unit and name. No array is read.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        params = self._stored(step)["params"]
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)

    def restore(self, step: int, abstract: dict[str, Any]) -> tuple[Any, Any]:
        """Read the state after `step` straight to where it belongs.

        Args:
            abstract: `params` and `optimizer` as `jax.ShapeDtypeStruct`s with shardings.

        Raises:
            CheckpointError: it does not hold exactly that state.
        """
        state = self._load(step, abstract)
        return state["params"], state["optimizer"]

    def restore_params(self, step: int, abstract_params: dict[str, Any]) -> Any:
        """`restore` of the parameters alone. The optimizer state is not read.

        Raises:
            CheckpointError: it does not hold exactly those parameters.
        """
        return self._load(step, {"params": abstract_params})["params"]

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _place(self, step: int) -> str:
        return str(self._path(step).absolute())

    def _steps(self) -> list[int]:
        """The committed ones, oldest first."""
        names = (path.name for path in self.directory.glob("*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _make_room(self, needed_bytes: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._discard_unfinished()
        free_bytes = shutil.disk_usage(self.directory).free
        if free_bytes < needed_bytes:
            raise OSError(f"it takes {needed_bytes / 1e9:.3g} GB, and the disk has {free_bytes / 1e9:.3g} GB left")

    def _commit(
        self, response: Any, step: int, started: float, blocking_seconds: float
    ) -> Saved | CheckpointError:
        """See a save to its end. A failure is returned, not raised: its stack would hold on to the arrays."""
        try:
            response.result()
        except Exception as error:
            self._discard_unfinished()
            return self._not_saved(step, error)
        seconds = time.monotonic() - started
        for old in self._steps()[: -self._keep] if self._keep else []:
            _discard(self._path(old))
        blocked = blocking_seconds if self._asynchronous else seconds
        return Saved(step, blocked, seconds, _size_bytes(self._path(step)), self._path(step))

    def _collect(self, wait: bool) -> None:
        """Take the outcome of the save in flight, if it has one."""
        if self._in_flight is None or not (wait or self._in_flight.done()):
            return
        outcome = self._in_flight.result()
        self._in_flight = None
        if isinstance(outcome, Saved):
            self._committed.append(outcome)
        else:
            self._failures.append(outcome)

    def _discard_unfinished(self) -> None:
        for path in self.directory.glob(f"*{_UNFINISHED}"):
            _discard(path)

    def _metadata(self, step: int) -> Any:
        steps = self._steps()
        if step not in steps:
            committed = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{self._path(step)}: there is no such checkpoint; committed steps: {committed}")
        if step not in self._known:
            try:
                self._known[step] = ocp.checkpointables_metadata(self._place(step))
            except Exception as error:
                raise self._unreadable(step, error) from error
        return self._known[step]

    def _stored(self, step: int) -> dict[str, Any]:
        """What describes the stored arrays: `params` and `optimizer` by unit."""
        stored = (self._metadata(step).metadata or {}).get(_ITEM)
        if not stored or not stored.keys() >= {"params", "optimizer"}:
            raise self._unreadable(step, "its arrays are not described")
        return stored

    def _load(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        # Compared here, since Orbax casts what has another dtype, and for what it lacks returns the description.
        stored = self._stored(step)
        if difference := _difference({kind: stored[kind] for kind in abstract}, abstract):
            raise CheckpointError(f"{self._path(step)}: {difference}; use the settings it was written with")
        try:
            with _context(abstract):
                return ocp.load_checkpointables(self._place(step), {_ITEM: abstract})[_ITEM]
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _unreadable(self, step: int, reason: object) -> CheckpointError:
        return CheckpointError(
            f"{self._path(step)}: this checkpoint cannot be read ({_one_line(reason)}); move that directory away "
            "to go on from the one before it"
        )

    def _not_saved(self, step: int, reason: object) -> CheckpointError:
        return CheckpointError(
            f"{self._path(step)}: step {step} could not be saved ({_one_line(reason)}); earlier checkpoints are "
            "untouched, and the next save tries anew"
        )


def _context(tree: Any) -> ocp.Context:
    """How Orbax handles the arrays of a tree."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = _TILE_BYTES
    context.asynchronous.timeout_secs = _PATIENCE_SECONDS
    context.pytree.loading.partial_load = True
    in_flight_bytes = max([_IN_FLIGHT_BYTES, *_sizes(tree)]) + 1  # Orbax refuses an array that takes all of it
    context.memory.read_concurrent_bytes = in_flight_bytes
    context.memory.write_concurrent_bytes = in_flight_bytes
    return context


def _sizes(tree: Any) -> list[int]:
    return [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in _leaves(tree).values()]


def _leaves(tree: Any) -> dict[tuple[str, str, str], Any]:
    """Arrays, or what describes them, by kind (params or optimizer), unit, and place inside the unit."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        kind, unit, *place = (jax.tree_util.keystr((key,), simple=True) for key in path)
        found[kind, unit, "/".join(place)] = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    return found


def _difference(stored: Any, wanted: Any) -> str | None:
    """The first array in which a checkpoint is not what is wanted of it, or None."""
    there, here = _leaves(stored), _leaves(wanted)
    for key in dict.fromkeys([*here, *there]):
        saved, asked = (_type(side[key]) if key in side else "missing" for side in (there, here))
        if saved != asked:
            kind, unit, place = key
            return f"{kind} of unit {unit}, {place}: {saved} in the checkpoint, {asked} in the model"
    return None


def _type(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _size_bytes(directory: Path) -> int | None:
    try:
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    except OSError:
        return None


def _discard(directory: Path) -> None:
    """Remove a checkpoint or what was to be one. If that is cut short, the rest is not taken for one."""
    doomed = directory.with_name(directory.name.removesuffix(_UNFINISHED) + _UNFINISHED)
    with suppress(OSError):
        directory.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _one_line(reason: object) -> str:
    """What was first to go wrong."""
    while isinstance(reason, BaseException) and reason.__cause__:
        reason = reason.__cause__
    line = (str(reason).strip() or type(reason).__name__).splitlines()[0]
    return line if len(line) <= 200 else f"{line[:70]} ... {line[-120:]}"  # the system's own words come last
