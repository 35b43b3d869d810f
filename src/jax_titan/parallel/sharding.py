"""Logical axis names to mesh axes: `RULES` is the table, everything else reads it.

A dimension that its mesh axes do not divide stays whole (a byte vocabulary of 258 over 4 devices): every array
then still has equal parts. Layouts say so where it happens, see `whole_dimensions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

type Spec = tuple[tuple[str, ...] | str | None, ...]
"""What a `jax.sharding.PartitionSpec` is made of: for each dimension no axis, one or several."""

RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Parameters
        "embed": ("fsdp",),
        "vocab": ("tensor",),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "head_dim": (),
        "ffn": ("tensor",),
        "layers": (),
        # Activations; their width is whole, for it is what every device of a tensor group reads
        "batch": ("data", "fsdp"),
        "sequence": (),
        "activation_embed": (),
    }
)
"""Which mesh axes split a logical axis. One table for parameters, gradients, optimizer state and activations."""

BATCH = RULES["batch"]
"""The mesh axes that split the sequences of a microbatch."""


def spec_of(axes: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]) -> Spec:
    """How an array is split.

    Args:
        axes: the logical name of each dimension.
        shape: its dimensions.
        sizes: of the mesh's axes.

    Returns:
        For each dimension the mesh axes that split it, without trailing Nones. Axes of one part are named too:
        a stage with more devices reads the same spec.

    Raises:
        ValueError: an axis that the table does not know, or another number of dimensions.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} logical axes {tuple(axes)} for {len(shape)} dimensions {tuple(shape)}")
    if unknown := [axis for axis in axes if axis not in RULES]:
        raise ValueError(f"logical axis {unknown[0]!r} is not in the table: {', '.join(RULES)}")
    return divisible([RULES[axis] for axis in axes], shape, sizes)


def divisible(wanted: Sequence[Any], shape: Sequence[int], sizes: Mapping[str, int]) -> Spec:
    """A spec without the axes that do not divide their dimension.

    Args:
        wanted: for each leading dimension None, an axis or several.
        shape: of the array.
        sizes: of the mesh's axes; others are left out.
    """
    spec: list[Any] = []
    for split, size in zip(wanted, shape, strict=False):
        kept: list[str] = []
        parts = 1
        for axis in (split,) if isinstance(split, str) else split or ():
            if axis in sizes and size % (parts * sizes[axis]) == 0:
                parts *= sizes[axis]
                kept.append(axis)
        spec.append(tuple(kept) if len(kept) > 1 else (kept[0] if kept else None))
    while spec and spec[-1] is None:
        spec.pop()
    return tuple(spec)


def whole_dimensions(axes: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """The logical axes, with their sizes, that the table would split and that stay whole."""
    return [
        (axis, size)
        for axis, size in zip(axes, shape, strict=True)
        if any(sizes.get(m, 1) > 1 for m in RULES[axis])
        and not divisible([RULES[axis]], [size], {m: n for m, n in sizes.items() if n > 1})
    ]


def parts_of(spec: Spec, sizes: Mapping[str, int]) -> int:
    """Into how many different parts a spec splits an array."""
    parts = 1
    for split in spec:
        for axis in (split,) if isinstance(split, str) else split or ():
            parts *= sizes[axis]
    return parts


def constrain(x: Any, axes: Sequence[str]) -> Any:
    """Ask for an activation to be split by the table, over whatever mesh the caller is being compiled for.

    Without a mesh (one device, a test) it changes nothing: models call it and know no mesh. The mesh is JAX's
    current one, which a layout sets while its functions are traced.

    Args:
        x: an array, or a tracer of one.
        axes: the logical name of each dimension.
    """
    import jax
    from jax.sharding import PartitionSpec

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec_of(axes, x.shape, dict(mesh.shape))))
