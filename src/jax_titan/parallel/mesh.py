"""Meshes: the devices of a layout, or of one pipeline stage, as a grid of data x fsdp x tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

AXES = ("data", "fsdp", "tensor")
"""The axes of every mesh, outermost first: neighbours in the list of devices share a tensor group."""


@dataclasses.dataclass(frozen=True)
class Degrees:
    """How many parts each axis of a mesh has.

    Attributes:
        data: copies of the parameters, each with its own part of the batch.
        fsdp: parts of the parameters along their `embed` dimension, each with its own part of the batch too.
        tensor: parts of the heads, of the feed-forward width and of the vocabulary.

    Source: fsdp, Rajbhandari et al. 2019 (arXiv:1910.02054), stage 3; tensor, Shoeybi et al. 2019
    (arXiv:1909.08053), section 3.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"{name}: {size} is not a number of parts; use 1 or more")

    @property
    def sizes(self) -> Mapping[str, int]:
        """Parts by axis, in the order of `AXES`."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def batch_parts(self) -> int:
        """Parts of the batch: data and fsdp both split it."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        split = [f"{axis} {size}" for axis, size in self.sizes.items() if size > 1]
        return " x ".join(split) or "one device"


def make_mesh(devices: Sequence[Any], degrees: Degrees) -> Any:
    """The `jax.sharding.Mesh` of some devices.

    Args:
        devices: as many as `degrees` says.
        degrees: parts of each axis.

    Raises:
        ValueError: another number of devices.
    """
    import numpy as np
    from jax.sharding import Mesh

    if len(devices) != degrees.devices:
        raise ValueError(f"{len(devices)} devices for a mesh of {degrees.devices} ({degrees})")
    return Mesh(np.array(devices).reshape(tuple(degrees.sizes.values())), AXES)
