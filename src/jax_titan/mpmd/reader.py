"""Reading the partitioner's module into a `Program`.

Its `main` holds only fragment calls, transfers and a return; every fragment is a function of its own. Types of the
partitioner's dialect have no Python class: their text is the interface, and this file the only one that reads it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.mlir import ir

from jax_titan.mpmd.program import Call, Fragment, Program, Spec, Transfer, Value, divisible
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


def read_program(
    module: Any,
    topology: Topology,
    name: str,
    *,
    donated: tuple[int, ...],
    input_names: Sequence[str],
    output_names: Sequence[str],
    scheduled: bool,
) -> Program:
    """Read a partitioned module.

    Args:
        module: what the partitioner returned.
        topology: what it was told to cut for.
        name: of the program.
        donated: positions of the arguments that the caller gives up.
        input_names, output_names: what the user calls the flat arguments and results.
        scheduled: each stage must be one forward and one backward, all of it named.

    Raises:
        PartitionError: the module holds something that we do not know, or that no stage of a schedule can run.
    """
    functions = {
        op.attributes["sym_name"].value: op for op in module.body.operations if op.operation.name == "func.func"
    }
    declarations = [op for op in module.body.operations if op.operation.name == "sdy.mesh"]
    block = functions["main"].regions[0].blocks[0]
    values: list[Value] = []
    index: dict[Any, int] = {}

    def define(mlir_value) -> int:
        index[mlir_value] = len(values)
        value = _value_of(mlir_value.type)
        sizes = dict(topology.axes()[value.mesh])
        values.append(dataclasses.replace(value, spec=divisible(value.spec, value.shape, sizes)))
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
                    origin = _origin(op, topology)
                    if origin is None and scheduled:
                        raise PartitionError(_outside(name, op, block, output_names, mesh))
                    # Constants and what is only passed on: in a program without schedule, any place will do.
                    stage, transposes = origin or (topology.first_stage_on(mesh), 0)
                    kind = "F" if transposes == 0 else ("W" if (stage, transposes) in seen else "B")
                    seen.add((stage, transposes))
                    fragment_index[callee, mesh] = len(fragments)
                    fragments.append(
                        Fragment(
                            name=f"{name}_{len(fragments)}_{kind}{stage}",
                            kind=kind,
                            stage=stage,
                            mesh=mesh,
                            text=_standalone(
                                callee, functions, _meshes_of(mesh, declarations, topology), topology
                            ),
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
        input_names=tuple(input_names),
        output_names=tuple(output_names),
        donated=donated,
    )


def _origin(op: Any, topology: Topology) -> tuple[int, int] | None:
    """Stage number and transpose count of a fragment, from the names that went into it; None without any."""
    text = str(op.attributes["origin"]) if "origin" in op.attributes else ""
    named = re.findall(r'"([^"]*)"(?:\((\d+)\))?', text)
    origins = [
        (topology.assignment[part][1], int(count or 0)) for part, count in named if part in topology.assignment
    ]
    return (origins[0][0], max(transposes for _, transposes in origins)) if origins else None


def _outside(name: str, op: Any, block: Any, output_names: Sequence[str], mesh: str) -> str:
    """The message for operations that no part holds: which results come of them, and the way out."""
    returned = list(list(block.operations)[-1].operands)
    made = [output_names[i] for i, value in enumerate(returned) if value in list(op.results)]
    what = ", ".join(made) if made else "something"
    return (
        f"{name}: {what} on {mesh} is computed outside every named part; compute each leaf of the accumulator in "
        "a part, from its own earlier value, and let no part be without use of its inputs"
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


def _donated(function: Any) -> tuple[int, ...]:
    if "arg_attrs" not in function.attributes:
        return ()
    marks = ("jax.buffer_donor", "tf.aliasing_output")
    attributes = [str(attribute) for attribute in function.attributes["arg_attrs"]]
    return tuple(i for i, text in enumerate(attributes) if any(mark in text for mark in marks))


def _meshes_of(mesh: str, declarations: Sequence[Any], topology: Topology) -> str:
    """The mesh declarations of a fragment: its submesh, and what the partitioner adds for what is not split."""
    axes = ", ".join(f'"{axis}"={size}' for axis, size in topology.axes()[mesh])
    others = [str(op) for op in declarations if not re.search(_mesh_symbol(topology), str(op))]
    return "\n".join([f"sdy.mesh @mesh = <[{axes}]>", *others])


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
    return re.sub(_mesh_symbol(topology), "@mesh", text)


def _mesh_symbol(topology: Topology) -> str:
    return rf"@(?:{'|'.join(re.escape(mesh) for mesh in [*topology.meshes, 'mesh'])})\b"
