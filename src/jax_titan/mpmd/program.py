"""What the partitioner leaves: fragments, the transfers between them, and the values that both read and write.

A `Program` is plain data, in the order of the single-device function. It can be printed, saved, loaded and
compared, and it knows nothing of devices, schedules or JAX: meshes are names with axes, a fragment is StableHLO
text. `executor.py` runs it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Literal

# A dimension of a value is split over no mesh axis, one axis or several.
Spec = tuple[str | tuple[str, ...] | None, ...]
Kind = Literal["F", "B", "W"]
_BYTES = {"bfloat16": 2, "bool": 1}


def divisible(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Spec:
    """A spec without the axes that do not divide their dimension: arrays between programs have equal parts."""
    result: list[str | tuple[str, ...] | None] = []
    for split, size in zip(spec, shape, strict=False):
        kept: tuple[str, ...] = ()
        for axis in (split,) if isinstance(split, str) else split or ():
            if size % math.prod(sizes[a] for a in (*kept, axis)) == 0:
                kept = (*kept, axis)
        result.append(kept if len(kept) > 1 else (kept[0] if kept else None))
    while result and result[-1] is None:
        result.pop()
    return tuple(result)


@dataclasses.dataclass(frozen=True)
class Value:
    """An array of the program.

    Attributes:
        shape: global shape.
        dtype: NumPy name of the element type.
        mesh: the submesh it lives on.
        spec: how each dimension is split over the axes of that submesh; shorter than `shape` means unsplit.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: str
    spec: Spec = ()

    @property
    def global_bytes(self) -> int:
        bits = "".join(c for c in self.dtype if c.isdigit())
        size = _BYTES[self.dtype] if self.dtype in _BYTES else int(bits) // 8
        return math.prod(self.shape) * size


@dataclasses.dataclass(frozen=True)
class Fragment:
    """One program of one stage.

    Attributes:
        name: readable and unique within its program.
        kind: F forward (nothing in it is transposed), B backward, W weight gradients of a split backward.
        stage: the stage's number.
        mesh: the submesh that it runs on.
        text: a StableHLO module whose `main` is the fragment; every mesh in it is called `@mesh`.
        inputs, outputs: its values, in argument order.
        donated: positions of the inputs whose memory it may overwrite.
    """

    name: str
    kind: Kind
    stage: int
    mesh: str
    text: str = dataclasses.field(repr=False)
    inputs: tuple[Value, ...] = dataclasses.field(repr=False)
    outputs: tuple[Value, ...] = dataclasses.field(repr=False)
    donated: tuple[int, ...] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Call:
    """Run a fragment: `fragment` indexes `Program.fragments`, inputs and outputs index `Program.values`."""

    fragment: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Copy a value to the submesh of another: both index `Program.values`."""

    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A partitioned function.

    Attributes:
        name: of the function it was cut from.
        meshes: the axes (name, size) of every submesh, by its name.
        values: every array of the program.
        fragments: the distinct programs.
        operations: calls and transfers, in the order of the single-device function.
        inputs, outputs: positions in `values` of the function's flat arguments and results.
        input_names, output_names: what the user calls them, for messages.
        donated: positions in `inputs` of the arguments that the caller gives up.
    """

    name: str
    meshes: dict[str, tuple[tuple[str, int], ...]]
    values: tuple[Value, ...]
    fragments: tuple[Fragment, ...]
    operations: tuple[Call | Transfer, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    donated: tuple[int, ...]

    @property
    def stages(self) -> int:
        return 1 + max(fragment.stage for fragment in self.fragments)

    def calls(self) -> Iterator[Call]:
        return (operation for operation in self.operations if isinstance(operation, Call))

    def transfers(self) -> Iterator[Transfer]:
        return (operation for operation in self.operations if isinstance(operation, Transfer))

    def used_inputs(self) -> frozenset[int]:
        """Positions in `inputs` of the arguments that anything reads or returns."""
        read = set(self.outputs)
        for operation in self.operations:
            read.update(operation.inputs if isinstance(operation, Call) else (operation.source,))
        return frozenset(i for i, value in enumerate(self.inputs) if value in read)

    def with_specs(self, specs: Mapping[int, Spec | None]) -> Program:
        """The same program with some values split otherwise, as far as their submesh divides them.

        Args:
            specs: by position in `values`; None leaves a value as it is.
        """
        values = list(self.values)
        for index, spec in specs.items():
            if spec is not None:
                value = values[index]
                fitting = divisible(spec, value.shape, dict(self.meshes[value.mesh]))
                values[index] = dataclasses.replace(value, spec=fitting)
        fragments = list(self.fragments)
        for call in self.calls():
            fragments[call.fragment] = dataclasses.replace(
                fragments[call.fragment],
                inputs=tuple(values[i] for i in call.inputs),
                outputs=tuple(values[i] for i in call.outputs),
            )
        return dataclasses.replace(self, values=tuple(values), fragments=tuple(fragments))

    def describe(self) -> str:
        """The program in a line an operation, for people."""
        lines = [f"{self.name}: {len(self.fragments)} fragments, {len(list(self.transfers()))} transfers"]
        for operation in self.operations:
            if isinstance(operation, Call):
                fragment = self.fragments[operation.fragment]
                lines.append(
                    f"  {fragment.kind}{fragment.stage} on {fragment.mesh}: {len(operation.inputs)} in "
                    f"({len(fragment.donated)} donated), {len(operation.outputs)} out   {fragment.name}"
                )
            else:
                value, target = self.values[operation.source], self.values[operation.target]
                shape = ",".join(map(str, value.shape))
                lines.append(f"  {value.mesh} -> {target.mesh}: {value.dtype}[{shape}]")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The whole program as one JSON object; `from_json` gives back an equal one."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        raw = json.loads(text)
        return cls(
            name=raw["name"],
            meshes={name: tuple((a, n) for a, n in axes) for name, axes in raw["meshes"].items()},
            values=tuple(_value(v) for v in raw["values"]),
            fragments=tuple(_fragment(f) for f in raw["fragments"]),
            operations=tuple(_operation(o) for o in raw["operations"]),
            inputs=tuple(raw["inputs"]),
            outputs=tuple(raw["outputs"]),
            input_names=tuple(raw["input_names"]),
            output_names=tuple(raw["output_names"]),
            donated=tuple(raw["donated"]),
        )


def _value(raw: dict) -> Value:
    spec = tuple(tuple(axes) if isinstance(axes, list) else axes for axes in raw["spec"])
    return Value(tuple(raw["shape"]), raw["dtype"], raw["mesh"], spec)


def _fragment(raw: dict) -> Fragment:
    values = {key: tuple(_value(v) for v in raw[key]) for key in ("inputs", "outputs")}
    return Fragment(**{**raw, **values, "donated": tuple(raw["donated"])})


def _operation(raw: dict) -> Call | Transfer:
    if "source" in raw:
        return Transfer(**raw)
    return Call(raw["fragment"], tuple(raw["inputs"]), tuple(raw["outputs"]))
