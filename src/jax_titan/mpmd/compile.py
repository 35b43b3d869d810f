"""From a fragment's StableHLO text to a compiled function on its submesh, through `jax.jit`.

The text enters JAX as the lowering of a primitive, so that fragments use the public compile path: JAX's own call
fast path, persistent compilation cache and profiler names.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core as jex
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_titan.mpmd.program import Fragment, Value


@dataclasses.dataclass(frozen=True, eq=False)
class _Text:
    """A fragment as a static parameter of the primitive: compared by identity, so JAX's caches stay cheap."""

    fragment: Fragment


fragment_p = jex.Primitive("mpmd_fragment")
fragment_p.multiple_results = True
fragment_p.def_abstract_eval(
    lambda *_, text: [ShapedArray(value.shape, value.dtype) for value in text.fragment.outputs]
)


def _operations(module: ir.Module) -> list[Any]:
    return list(module.body.operations)


def _lower(ctx, *args, text: _Text):
    target = ctx.module_context
    source = ir.Module.parse(text.fragment.text, target.context)
    for op in _operations(source):
        # Merging knows functions only: mesh declarations move over by hand, once.
        if op.operation.name == "sdy.mesh":
            if op.attributes["sym_name"].value in target.symbol_table:
                op.operation.erase()
            else:
                op.operation.move_before(next(iter(target.module.body.operations)).operation)
                target.symbol_table.insert(op.operation)
    main = next(op for op in _operations(source) if op.attributes["sym_name"].value == "main")
    for attribute in ("arg_attrs", "res_attrs", "mesh_shape", "reserved_hbm_bytes"):
        if attribute in main.attributes:  # shardings and donation are those of the surrounding jit
            del main.attributes[attribute]
    results = list(main.type.results)
    name = mlir.merge_mlir_modules(target.module, "fragment", source, dst_symtab=target.symbol_table)
    return list(func.CallOp(results, ir.FlatSymbolRefAttr.get(name), list(args)).results)


mlir.register_lowering(fragment_p, _lower, cacheable=False)


def sharding_of(value: Value, meshes: Mapping[str, Mesh]) -> NamedSharding:
    """Where a value of a program lives."""
    return NamedSharding(meshes[value.mesh], PartitionSpec(*value.spec))


def compile_gather(value: Value, target: Value, meshes: Mapping[str, Mesh]) -> Callable[..., Any] | None:
    """What must be done to a value on its own submesh before it can be copied to that of another without waiting.

    `jax.device_put` copies part by part when both are split alike, and from an array that every device holds
    whole; anything else it sends through the host, and waits for it.

    Returns:
        A compiled function of one array that gives one result, whole on every device; None when nothing is needed.
    """
    source, there = sharding_of(value, meshes), sharding_of(target, meshes)
    parts = [list(sharding.devices_indices_map(value.shape).values()) for sharding in (source, there)]
    if source.is_fully_replicated or parts[0] == parts[1]:
        return None
    whole = NamedSharding(source.mesh, PartitionSpec())
    shape = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=source)
    return jax.jit(lambda x: [x], out_shardings=[whole]).lower(shape).compile()


def compile_fragments(fragments: Sequence[Fragment], meshes: Mapping[str, Mesh]) -> list[Callable[..., Any]]:
    """Compile fragments for their submeshes.

    Args:
        fragments: of one program or of several.
        meshes: the JAX mesh of every submesh.

    Returns:
        A function for each fragment: its inputs as positional arrays, its outputs as a list. Calling it is
        asynchronous; donated inputs are gone afterwards.
    """
    # Tracing holds the interpreter lock; XLA does not, and compiles while the next fragment is lowered.
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        pending = [pool.submit(_lowered(fragment, meshes).compile) for fragment in fragments]
        return [compiled.result() for compiled in pending]


def _lowered(fragment: Fragment, meshes: Mapping[str, Mesh]) -> jax.stages.Lowered:
    text = _Text(fragment)

    def call(*args):
        return fragment_p.bind(*args, text=text)

    call.__name__ = fragment.name
    jitted = jax.jit(
        call,
        in_shardings=tuple(sharding_of(value, meshes) for value in fragment.inputs),
        out_shardings=[sharding_of(value, meshes) for value in fragment.outputs],
        donate_argnums=fragment.donated,
        keep_unused=True,
    )
    with warnings.catch_warnings():
        # Residuals may be marked as free to overwrite without an output of their shape: that is no loss.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return jitted.lower(*(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in fragment.inputs))
