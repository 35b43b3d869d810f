"""A global batch on its way to the devices: what it must look like, and how it is cut into microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

type HostBatch = Mapping[str, np.ndarray]

BATCH_DTYPES: Mapping[str, Any] = {
    "tokens": np.int32,
    "targets": np.int32,
    "segments": np.int32,
    "positions": np.int32,
    "weights": np.float32,
}


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """How a global batch of [sequences, tokens] is cut.

    Args:
        sequences, tokens: shape of the global batch.
        count: number of equal microbatches.
        parts: devices, or groups of them, that share the sequences of each microbatch.

    Raises:
        ValueError: the parts would not be equal.
    """

    sequences: int
    tokens: int
    count: int
    parts: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or self.sequences % (self.count * self.parts):
            raise ValueError(
                f"{self.sequences} sequences cannot be cut into {self.count} equal microbatches for "
                f"{self.parts} devices each"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """[sequences, tokens] of one microbatch."""
        return self.sequences // self.count, self.tokens

    def shapes(self, leading: tuple[int, ...] = (), sharding: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of one microbatch, behind `leading` dimensions."""
        return {
            name: jax.ShapeDtypeStruct((*leading, *self.shape), dtype, sharding=sharding)
            for name, dtype in BATCH_DTYPES.items()
        }

    def cut(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """The batch as [count, sequences of a microbatch, tokens] each.

        Raises:
            ValueError: the batch has another shape.
        """
        shape = (self.sequences, self.tokens)
        for name in BATCH_DTYPES:
            if np.shape(batch[name]) != shape:
                raise ValueError(f"batch[{name!r}] is {np.shape(batch[name])}; this layout was built for {shape}")
        return {
            name: np.asarray(batch[name], dtype).reshape(self.count, *self.shape)
            for name, dtype in BATCH_DTYPES.items()
        }


def total_weight(batch: HostBatch, dtype: Any) -> np.ndarray:
    """The sum of weights: known on the host, so no device has to send it; a batch without targets divides by 1."""
    total = float(np.sum(batch["weights"], dtype=np.float64))
    return np.asarray(total if total > 0 else 1.0, dtype)
