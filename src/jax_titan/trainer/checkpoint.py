"""Checkpoints: parameters and optimizer state by unit name, so that one does not depend on how the model was cut.

Orbax writes and commits them; a half-written one is never taken for one. They are uncompressed: random weights do
not compress, and compressing costs several CPU-seconds a gigabyte.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

_ITEM = "state"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says what to do."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: where they are kept, one folder a step.
        keep: how many of the latest stay.
    """

    def __init__(self, directory: Path, keep: int):
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells its inner life at INFO and WARNING
        context = ocp.Context()
        context.array.saving.use_compression = False
        self.directory = directory
        self._checkpointer = ocp.training.Checkpointer(
            str(directory.absolute()),
            context=context,
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),  # pyright: ignore
            cleanup_tmp_directories=True,
        )

    @property
    def latest_step(self) -> int | None:
        """The newest committed step, or None."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def save(self, step: int, params: Any, optimizer: Any, facts: dict[str, Any]) -> Path:
        """Write the state after `step`, and return once it is committed.

        Args:
            params, optimizer: by unit name.
            facts: small JSON facts to keep beside it, such as digests.
        """
        self._checkpointer.save_checkpointables(
            step, {_ITEM: {"params": params, "optimizer": optimizer}}, custom_metadata=facts, overwrite=True
        )
        return self.directory / str(step)

    def facts(self, step: int) -> dict[str, Any]:
        """What `save` was told beside the state."""
        kept: Any = self._checkpointer.checkpointables_metadata(step).custom_metadata
        return dict(kept or {})

    def restore(self, step: int, abstract: dict[str, Any]) -> tuple[Any, Any]:
        """Read the state after `step` straight to where it belongs.

        Args:
            abstract: `params` and `optimizer` as `jax.ShapeDtypeStruct`s with shardings.

        Raises:
            CheckpointError: it does not hold that state.
        """
        try:
            state = self._checkpointer.load_checkpointables(step, {_ITEM: abstract})[_ITEM]
        except Exception as error:
            raise CheckpointError(
                f"{self.directory / str(step)}: cannot be read ({error}); remove that directory to go on from the "
                "checkpoint before it"
            ) from error
        return state["params"], state["optimizer"]

    def close(self) -> None:
        self._checkpointer.close()


def size_bytes(directory: Path) -> int | None:
    """Bytes of all files below a directory; None when it cannot be walked."""
    try:
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    except OSError:
        return None
