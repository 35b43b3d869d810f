"""Cutting a single-device function into one program a stage.

`partition` traces a function whose parts are named (`annotate.stage`), hands it to Shardy's MPMD partitioner and
reads the result into a `Program`. The function is small on purpose: the pipeline cuts *one* microbatch of gradient
accumulation and one optimizer update, so this costs the same for any number of microbatches and any schedule.

Source: Shardy's MPMD dialect (https://openxla.org/shardy); what its Python binding accepts was measured, see
the guard in `_jaxlib.py`.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.sharding import NamedSharding, PartitionSpec

from jax_titan.mpmd._jaxlib import load_partitioner, silenced
from jax_titan.mpmd.annotate import lowering_for_partitioner
from jax_titan.mpmd.program import Call, Fragment, Program, Spec, Transfer, Value
from jax_titan.mpmd.topology import Topology

_DTYPES = {
    "i1": "bool",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "ui8": "uint8",
    "ui16": "uint16",
    "ui32": "uint32",
    "ui64": "uint64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
}


class PartitionError(ValueError):
    """The function cannot be cut as asked; the message speaks of the user's names."""


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
            `PartitionSpec` says how the leaf is split over its own submesh.
        topology: the submeshes and the assignment of names to them.
        argument_meshes: for each argument a tree prefix of submesh names: where its leaves live.
        result_meshes: the same for the result.
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
    lowered, out_tree, flat_result_count = _lower(function, arguments, topology, tuple(donate), name)
    lowered_at = time.perf_counter()
    donated = tuple(i for i, leaf in enumerate(jax.tree.leaves(lowered.args_info)) if leaf.donated)
    inputs = _broadcast_names(tuple(argument_meshes), tuple(arguments), topology, "argument")
    outputs = _broadcast_names(
        result_meshes, jax.tree.unflatten(out_tree, [0] * flat_result_count), topology, "result"
    )
    module = partitioner.clone_mlir_module(lowered.compiler_ir("stablehlo"))
    with silenced():
        try:
            result = partitioner.apply_mpmd_partitioning(
                module,
                func_name="main",
                named_meshes=[(mesh, list(axes)) for mesh, axes in topology.axes().items()],
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
    program = _read(result.mpmd_module, topology, name, donated, scheduled)
    return Partitioned(program, out_tree, lowered_at - start, time.perf_counter() - lowered_at)


def _lower(function: Callable, arguments: Sequence[Any], topology: Topology, donate: tuple[int, ...], name: str):
    """Lower with all shardings rewritten onto one representative submesh; the partitioner asks for that."""
    representative = next(iter(topology.meshes.values()))

    def abstract(leaf):
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else None
        placed = NamedSharding(representative, spec) if spec is not None and any(spec) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    # A fresh function object, so that JAX's caches never hand out the lowering of the plain mode.
    def fresh(*args):
        return function(*args)

    fresh.__name__ = re.sub(r"\W", "_", name)
    with lowering_for_partitioner():
        traced = jax.jit(fresh, donate_argnums=donate, keep_unused=True).trace(
            *jax.tree.map(abstract, tuple(arguments))
        )
        lowered = traced.lower()
    out_tree = jax.tree.structure(traced.out_info)
    return lowered, out_tree, out_tree.num_leaves


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


def _read(module: Any, topology: Topology, name: str, donated: tuple[int, ...], scheduled: bool) -> Program:
    """Read the partitioned module: a main of calls and transfers, and one function a fragment."""
    functions = {
        op.attributes["sym_name"].value: op for op in module.body.operations if op.operation.name == "func.func"
    }
    mesh_declarations = [op for op in module.body.operations if op.operation.name == "sdy.mesh"]
    declaration = _rename_meshes(str(mesh_declarations[0]), topology) if mesh_declarations else ""
    block = functions["main"].regions[0].blocks[0]
    values: list[Value] = []
    index: dict[Any, int] = {}

    def define(mlir_value) -> int:
        index[mlir_value] = len(values)
        values.append(_value_of(mlir_value.type))
        return index[mlir_value]

    inputs = tuple(define(argument) for argument in block.arguments)
    outputs: tuple[int, ...] = ()
    fragments: list[Fragment] = []
    fragment_index: dict[tuple[str, str], int] = {}
    operations: list[Call | Transfer] = []
    seen: set[tuple[int, int]] = set()
    for op in block.operations:
        match op.operation.name:
            case "mpmd.fragment_call":
                callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
                mesh = ir.StringAttr(op.attributes["mesh_name"]).value
                reads = tuple(index[operand] for operand in op.operands)
                writes = tuple(define(result) for result in op.results)
                if (callee, mesh) not in fragment_index:
                    stage, transposes = _origin(op, topology, mesh, scheduled)
                    kind = "F" if transposes == 0 else ("W" if (stage, transposes) in seen else "B")
                    seen.add((stage, transposes))
                    fragment_index[callee, mesh] = len(fragments)
                    fragments.append(
                        Fragment(
                            name=f"{name}_{len(fragments)}_{kind}{stage}",
                            kind=kind,
                            stage=stage,
                            mesh=mesh,
                            text=_standalone(callee, functions, declaration, topology),
                            inputs=tuple(values[i] for i in reads),
                            outputs=tuple(values[i] for i in writes),
                            donated=_donated(functions[callee]),
                        )
                    )
                operations.append(Call(fragment_index[callee, mesh], reads, writes))
            case "mpmd.transfer":
                source = index[op.operands[0]]
                operations.append(Transfer(source, define(op.results[0])))
            case "func.return":
                outputs = tuple(index[operand] for operand in op.operands)
            case other:
                raise PartitionError(f"{name}: the partitioner left an operation that we do not know: {other}")
    return Program(
        name=name,
        meshes={mesh: tuple(axes) for mesh, axes in topology.axes().items()},
        values=tuple(values),
        fragments=tuple(fragments),
        operations=tuple(operations),
        inputs=inputs,
        outputs=outputs,
        donated=donated,
    )


def _origin(op: Any, topology: Topology, mesh: str, scheduled: bool) -> tuple[int, int]:
    """Stage number and transpose count of a fragment, from the names that went into it."""
    text = str(op.attributes["origin"]) if "origin" in op.attributes else ""
    named = re.findall(r'"((?:[^"\\]|\\.)*)"(?:\((\d+)\))?', text)
    origins = [
        (topology.assignment[part][1], int(count or 0)) for part, count in named if part in topology.assignment
    ]
    if origins:
        return origins[0][0], max(transposes for _, transposes in origins)
    if not scheduled:  # constants and what is only passed on: any place in the order will do
        return min(index for other, index in topology.assignment.values() if other == mesh), 0
    raise PartitionError(
        f"operations outside every named part would be a program of their own on {mesh}; move them into a part"
    )


_MESH_TENSOR = re.compile(r'^!mpmd\.mesh_tensor<"([^"]+)", tensor<((?:\d+x)*)([a-z0-9]+)>')
_SHARDING = re.compile(r"sharding=<@\w+, \[(.*?)\]")


def _value_of(mlir_type: Any) -> Value:
    # mesh_tensor has no Python class; its text is the interface.
    text = str(mlir_type)
    match = _MESH_TENSOR.match(text)
    if match is None or match[3] not in _DTYPES:
        raise PartitionError(f"the partitioner left a value of a type that we do not know: {text}")
    shape = tuple(int(size) for size in match[2].split("x") if size)
    return Value(shape, _DTYPES[match[3]], match[1], _spec(text))


def _spec(text: str) -> Spec:
    match = _SHARDING.search(text)
    if match is None:
        return ()
    dimensions = []
    for dimension in re.findall(r"\{([^{}]*)\}", match[1]):
        axes = tuple(re.findall(r'"([^"]+)"', dimension))
        dimensions.append(axes if len(axes) > 1 else (axes[0] if axes else None))
    while dimensions and dimensions[-1] is None:
        dimensions.pop()
    return tuple(dimensions)


def partition_spec(value: Value) -> PartitionSpec:
    return PartitionSpec(*value.spec)


def _donated(function: Any) -> tuple[int, ...]:
    if "arg_attrs" not in function.attributes:
        return ()
    marks = ("jax.buffer_donor", "tf.aliasing_output")
    attributes = [str(attribute) for attribute in function.attributes["arg_attrs"]]
    return tuple(i for i, text in enumerate(attributes) if any(mark in text for mark in marks))


def _standalone(callee: str, functions: Mapping[str, Any], declaration: str, topology: Topology) -> str:
    """The fragment's function as `main` of a module of its own, with the private functions it calls."""
    needed, pending = [callee], [callee]
    while pending:
        text = str(functions[pending.pop()])
        symbols = {a or b for a, b in re.findall(r'@(?:([\w.$-]+)|"([^"]+)")', text)}
        fresh = sorted(symbols & functions.keys() - set(needed) - {"main"})
        needed += fresh
        pending += fresh
    bodies = [str(functions[callee]).replace(_symbol(callee, str(functions[callee])) + "(", "@main(", 1)]
    bodies += [str(functions[other]) for other in needed[1:]]
    return "module {\n" + declaration + "\n" + _rename_meshes("\n".join(bodies), topology) + "\n}"


def _symbol(callee: str, text: str) -> str:
    return f"@{callee}" if f"@{callee}(" in text else f'@"{callee}"'


def _rename_meshes(text: str, topology: Topology) -> str:
    """One symbol for every submesh: which devices a fragment runs on is decided when it is compiled."""
    names = "|".join(re.escape(mesh) for mesh in [*topology.meshes, "mesh"])
    return re.sub(rf"@(?:{names})\b", "@mesh", text)
