"""Cutting a single-device function into one program a stage.

`partition` traces a function whose parts are named (`annotate.stage`), hands it to Shardy's MPMD partitioner and
reads the result into a `Program`. The function is small on purpose: the pipeline cuts *one* microbatch of gradient
accumulation and one optimizer update, so this costs the same for any number of microbatches and any schedule.

Source: Shardy's MPMD dialect (https://openxla.org/shardy); what its Python binding accepts was measured, see
the guard in `_jaxlib.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from jax_titan.mpmd._jaxlib import load_partitioner, silenced
from jax_titan.mpmd.annotate import lowering_for_partitioner
from jax_titan.mpmd.program import Program, Spec, divisible
from jax_titan.mpmd.reader import PartitionError, read_program
from jax_titan.mpmd.topology import Topology


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A program and what it cost to make.

    Attributes:
        program: the cut function.
        out_tree: how to put its flat results back together.
        lower_seconds: tracing and lowering to StableHLO.
        partition_seconds: the partitioner, and reading its result.
    """

    program: Program
    out_tree: Any
    lower_seconds: float
    partition_seconds: float


def partition(
    function: Callable,
    arguments: Sequence[Any],
    topology: Topology,
    *,
    argument_meshes: Sequence[Any],
    result_meshes: Any,
    result_specs: Sequence[Spec | None] = (),
    donate: Sequence[int] = (),
    scheduled: bool = True,
    split_backward: bool = False,
    name: str | None = None,
) -> Partitioned:
    """Cut a function into one program a stage.

    Args:
        function: takes `arguments`, returns a pytree of arrays; its parts are named by `annotate.stage`, with
            names that `topology.assignment` knows.
        arguments: pytrees of `jax.ShapeDtypeStruct` (or arrays, of which only shapes are read); a sharding with a
            `PartitionSpec` says how the leaf is split over its own submesh. While the function is traced JAX's
            current mesh has the axes of the submeshes, for `jax.lax.with_sharding_constraint`.
        topology: the submeshes and the assignment of names to them.
        argument_meshes: for each argument a tree prefix of submesh names: where its leaves live.
        result_meshes: the same for the result.
        result_specs: for the first leaves of the result, how each is split over its submesh; None, and those left
            out, are split as the partitioner finds best.
        donate: positions of the arguments whose memory the program may overwrite.
        scheduled: the function is one microbatch of a schedule: each stage has one forward and one backward. A
            function that runs once may visit a stage several times.
        split_backward: cut each backward in two, input gradients (B) and weight gradients (W).
        name: of the program; the function's own name by default.

    Raises:
        PartitionError: a name is not assigned, an argument's place does not exist, or the partitioner refuses.
        UnsupportedJaxlibError: the installed jaxlib has no partitioner that we know.
    """
    partitioner = load_partitioner()
    name = name or str(getattr(function, "__name__", "program"))
    start = time.perf_counter()
    representative = _representative(topology)
    lowered, out_tree = _lower(function, arguments, representative, topology.platform, tuple(donate), name)
    lowered_at = time.perf_counter()
    donated = tuple(i for i, leaf in enumerate(jax.tree.leaves(lowered.args_info)) if leaf.donated)
    inputs = _broadcast_names(tuple(argument_meshes), tuple(arguments), topology, "argument")
    outputs = _broadcast_names(
        result_meshes, jax.tree.unflatten(out_tree, [0] * out_tree.num_leaves), topology, "result"
    )
    module = partitioner.clone_mlir_module(lowered.compiler_ir("stablehlo"))
    _refuse_complex(module, name)
    if len(set(topology.axes().values())) > 1 and "sdy.manual_computation" in str(module):
        raise PartitionError(f"{name}: shard_map needs submeshes of equal size; these have {topology.axes()}")
    with silenced():
        try:
            result = partitioner.apply_mpmd_partitioning(
                module,
                func_name="main",
                # All of one size, whatever they have: sizes matter when a fragment is compiled.
                named_meshes=[(mesh, list(representative.shape.items())) for mesh in topology.meshes],
                assignment={
                    part: (mesh, index) if scheduled else mesh
                    for part, (mesh, index) in topology.assignment.items()
                },
                input_meshes=inputs,
                output_meshes=outputs,
                donate_argnums=list(donated),
                # Only "none": an unknown schedule name aborts the process inside the partitioner, and the
                # order of tasks is our own schedule's anyway.
                partitioning_options={
                    "mpmd_pipeline_schedule": "none",
                    "mpmd_infer_transfers": True,
                    "mpmd_infer_cross_mesh_reductions": True,
                    "mpmd_split_bwd_fragments": split_backward,
                },
                fragment_merge_rules=[],
                fragment_schedule_rules=[],
                phases=partitioner.PartitioningPhase.ALL,
            )
        except RuntimeError as error:
            raise PartitionError(f"{name}: {error}") from error
    program = read_program(
        result.mpmd_module,
        topology,
        name,
        donated=donated,
        input_names=_argument_names(function, arguments),
        output_names=_leaf_names("result", jax.tree.unflatten(out_tree, [0] * out_tree.num_leaves)),
        scheduled=scheduled,
    )
    program = program.with_specs(
        {
            **dict(zip(program.outputs, result_specs, strict=False)),
            **dict(zip(program.inputs, map(spec_of, jax.tree.leaves(tuple(arguments))), strict=True)),
        }
    )
    return Partitioned(program, out_tree, lowered_at - start, time.perf_counter() - lowered_at)


def spec_of(leaf: Any) -> Spec | None:
    """How a `jax.ShapeDtypeStruct` or an array says that it is split; None when it does not."""
    sharding = getattr(leaf, "sharding", None)
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else None


def _representative(topology: Topology) -> AbstractMesh:
    """One mesh that stands for all submeshes while the function is lowered; the partitioner asks for that.

    An axis has the size that it has where it is largest: axes of size 1 are simplified away early, and with them
    the shardings that a larger stage needs.
    """
    sizes: dict[str, int] = {}
    for axes in topology.axes().values():
        for axis, size in axes:
            sizes[axis] = max(size, sizes.get(axis, 1))
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _lower(
    function: Callable,
    arguments: Sequence[Any],
    representative: AbstractMesh,
    platform: str,
    donate: tuple[int, ...],
    name: str,
):
    """Lower with all shardings rewritten onto the representative mesh."""

    def abstract(path, leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            at = jax.tree_util.keystr(path)
            raise PartitionError(f"{name}: argument {at} is a typed PRNG key; pass jax.random.key_data of it")
        # An axis that divides a dimension on its own stage need not divide it here: then it is only left open.
        spec = divisible(spec_of(leaf) or (), leaf.shape, dict(representative.shape))
        placed = NamedSharding(representative, PartitionSpec(*spec)) if any(spec) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    # A fresh function object, so that JAX's caches never hand out the lowering of the plain mode.
    def fresh(*args):
        return function(*args)

    fresh.__name__ = re.sub(r"\W", "_", name)
    with lowering_for_partitioner(), use_abstract_mesh(representative):
        shapes = jax.tree_util.tree_map_with_path(abstract, tuple(arguments))
        traced = jax.jit(fresh, donate_argnums=donate, keep_unused=True).trace(*shapes)
        _refuse_callbacks(traced.jaxpr, name)
        lowered = traced.lower(lowering_platforms=(platform,))
    return lowered, jax.tree.structure(traced.out_info)


def _refuse_callbacks(jaxpr: Any, name: str) -> None:
    """A callback is an address in this process: it does not survive as text, and calling it would crash."""
    for primitive in _primitives(jaxpr):
        if "callback" in primitive or primitive == "debug_print":
            raise PartitionError(f"{name}: {primitive} cannot be cut; use no callbacks and prints in the function")


def _primitives(jaxpr: Any) -> Iterator[str]:
    """Names of all operations of a jaxpr, those inside others too."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation.primitive.name
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(parameter, "eqns"):
                yield from _primitives(parameter)


def _refuse_complex(module: Any, name: str) -> None:
    """The partitioner crashes the process when a complex array lies between two parts."""
    main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    block = main.regions[0].blocks[0]
    for value in [*block.arguments, *(result for op in block.operations for result in op.results)]:
        if "complex<" in str(value.type):
            raise PartitionError(
                f"{name}: a complex array ({value.type}) crosses from one part, or its forward, to another; "
                "keep real and imaginary part apart there"
            )


def _argument_names(function: Callable, arguments: Sequence[Any]) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        parameters = []
    names = []
    for position, argument in enumerate(arguments):
        root = parameters[position] if position < len(parameters) else f"argument {position}"
        names += _leaf_names(root, argument)
    return names


def _leaf_names(root: str, tree: Any) -> list[str]:
    return [root + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _broadcast_names(prefix: Any, tree: Any, topology: Topology, what: str) -> list[str]:
    """A mesh name for every leaf, from a tree prefix of names."""
    try:
        names = jax.tree.broadcast(prefix, tree, is_leaf=lambda x: isinstance(x, str))
    except ValueError as error:
        raise PartitionError(f"the {what} meshes do not fit the {what}s: {error}") from error
    flat = jax.tree.leaves(names)
    if unknown := sorted(set(flat) - set(topology.meshes)):
        raise PartitionError(f"{what} mesh {unknown[0]!r} is not in the topology ({', '.join(topology.meshes)})")
    return flat
