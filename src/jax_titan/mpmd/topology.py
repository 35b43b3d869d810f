"""Submeshes and which named part of a function lives on which: `Topology`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

type Device = jax.Device  # pyright: ignore[reportInvalidTypeForm]: a class at run time, a variable to the checker


@dataclasses.dataclass(frozen=True)
class Topology:
    """The submeshes of a pipeline.

    Attributes:
        meshes: a JAX mesh by the submesh's name.
        assignment: for every part's name the submesh it runs on and its stage number.
    """

    meshes: Mapping[str, Mesh]
    assignment: Mapping[str, tuple[str, int]]

    def __post_init__(self):
        for mesh in self.meshes:
            if not re.fullmatch(r"[A-Za-z_]\w*", mesh) or mesh in ("main", "mesh"):
                raise ValueError(
                    f"submesh {mesh!r}: use letters, digits and _ for a name, other than main and mesh"
                )
        if len(kinds := {tuple(mesh.axis_names) for mesh in self.meshes.values()}) > 1:
            raise ValueError(f"the submeshes have different axes: {', '.join(map(str, sorted(kinds)))}")
        for part, (mesh, _) in self.assignment.items():
            if not re.fullmatch(r'[^"\\\n]+', part):
                raise ValueError(f"part {part!r}: quotes and backslashes are not for names")
            if mesh not in self.meshes:
                raise ValueError(
                    f"part {part!r} is assigned to {mesh!r}; the submeshes are {', '.join(self.meshes)}"
                )

    def axes(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Axis names and sizes of every submesh."""
        return {name: tuple(mesh.shape.items()) for name, mesh in self.meshes.items()}

    @property
    def platform(self) -> str:
        """What the programs are compiled for: cpu, gpu, tpu."""
        return next(iter(self.meshes.values())).devices.flat[0].platform

    def first_stage_on(self, mesh: str) -> int:
        """The lowest stage number that is assigned to a submesh."""
        return min(index for other, index in self.assignment.values() if other == mesh)

    @property
    def stages(self) -> int:
        return 1 + max(index for _, index in self.assignment.values())

    @classmethod
    def of_stages(cls, meshes: Sequence[Mesh]) -> Topology:
        """Stage s, named `stage{s}`, on the submesh `mesh{s}`."""
        return cls(
            {f"mesh{s}": mesh for s, mesh in enumerate(meshes)},
            {f"stage{s}": (f"mesh{s}", s) for s in range(len(meshes))},
        )

    @classmethod
    def one_device_a_stage(cls, devices: Sequence[Device]) -> Topology:
        """Stage s, named `stage{s}`, on the submesh `mesh{s}` of one device."""
        return cls.of_stages([Mesh(np.array([device]), ("data",)) for device in devices])
