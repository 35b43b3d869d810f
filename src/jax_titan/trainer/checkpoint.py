"""Checkpoints: parameters and optimizer state by unit name, so that one does not depend on how the model was cut.

Orbax writes and commits them; a half-written one is never taken for one. They are uncompressed: random weights do
not compress, and compressing costs several CPU-seconds a gigabyte.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from jax_titan.trainer.errors import CheckpointError

_ITEM = "state"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: where they are kept, one folder a step.
        keep: how many of the latest stay.
    """

    def __init__(self, directory: Path, keep: int):
        # Orbax tells its inner life at INFO and WARNING, and every file of a damaged checkpoint once more.
        logging.getLogger("absl").setLevel(logging.ERROR)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
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
        """What `save` was told beside the state.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        try:
            kept: Any = self._checkpointer.checkpointables_metadata(step).custom_metadata
        except Exception as error:
            raise self._unreadable(step, error) from error
        if not kept:
            raise self._unreadable(step, "it has no metadata")
        return dict(kept)

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
            raise self._unreadable(step, error) from error
        return state["params"], state["optimizer"]

    def _unreadable(self, step: int, reason: object) -> CheckpointError:
        first_line = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        return CheckpointError(
            f"{self.directory / str(step)}: this checkpoint cannot be read ({first_line[:200]}); move that "
            "directory away to go on from the one before it"
        )

    def close(self) -> None:
        self._checkpointer.close()


def size_bytes(directory: Path) -> int | None:
    """Bytes of all files below a directory; None when it cannot be walked."""
    try:
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    except OSError:
        return None
