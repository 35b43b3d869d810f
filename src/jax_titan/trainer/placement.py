"""What lives where: units, stages, devices and bytes, worked out from the configuration and nothing allocated.

`jax-titan train ... --dry-run` prints it, and every real run prints the same lines before its first step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jax_titan.config import Config
from jax_titan.models.unit import Model, Unit
from jax_titan.mpmd import schedule as schedules
from jax_titan.observability.units import bytes_text
from jax_titan.parallel.mesh import AXES, Degrees
from jax_titan.parallel.sharding import parts_of, whole_dimensions
from jax_titan.trainer.adapters import Step
from jax_titan.trainer.optimizer import Optimizer
from jax_titan.trainer.state import abstract_optimizer, abstract_params


@dataclasses.dataclass(frozen=True)
class UnitPlacement:
    """A run of alike units: how many, and the parameters of each, [shape] and dtype by leaf."""

    names: tuple[str, ...]
    parameters: int
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]


@dataclasses.dataclass(frozen=True)
class StagePlacement:
    """One stage; layout spmd has one.

    Attributes:
        devices: positions in the list of devices.
        units: the names of its units.
        parameters: that it owns, over all its devices.
        parameter_bytes, gradient_bytes, optimizer_bytes: on each device, copies of shared units included.
        in_flight: most microbatches whose activations are held at once.
        whole: logical axes, and their sizes, that the mesh does not divide and that every device therefore holds.
    """

    devices: tuple[int, ...]
    degrees: Degrees
    units: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    in_flight: int
    whole: tuple[tuple[str, int], ...]

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state on each device: all that a step holds but activations."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclasses.dataclass(frozen=True)
class Placement:
    """A model on the devices of a layout.

    Attributes:
        bubble: idle part of the step under the schedule, with equal stages; None for spmd.
        microbatch: [sequences, tokens] of one microbatch.
    """

    model: str
    parameters: int
    units: tuple[UnitPlacement, ...]
    layout: str
    schedule: str | None
    bubble: float | None
    microbatches: int
    microbatch: tuple[int, int]
    stages: tuple[StagePlacement, ...]
    optimizer_dtype: str
    remat: str
    loss_chunk: int

    @classmethod
    def of(cls, config: Config, model: Model, optimizer: Optimizer) -> Placement:
        """The placement that `build_layout` makes of a configuration."""
        train = config.train
        pipelined = config.parallel.layout == "mpmd"
        degrees = config.degrees
        step = Step.cut(model, optimizer, len(degrees))
        timeline = None
        if pipelined:
            built = schedules.build(config.pipeline.schedule, len(degrees), train.microbatches)
            timeline = schedules.simulate(built)
        stages, first = [], 0
        for index, own in enumerate(degrees):
            devices = tuple(range(first, first + own.devices))
            first += own.devices
            in_flight = timeline.peak_activations[index] if timeline else 1
            stages.append(_stage(step, index, own, devices, in_flight))
        return cls(
            model=model.name,
            parameters=model.parameter_count(),
            units=tuple(_units(model)),
            layout=config.parallel.layout,
            schedule=config.pipeline.schedule if pipelined else None,
            bubble=1 - timeline.busy / timeline.makespan if timeline else None,
            microbatches=train.microbatches,
            microbatch=(train.batch // train.microbatches, train.sequence_length),
            stages=tuple(stages),
            optimizer_dtype=config.optimizer.state_dtype,
            remat=train.remat,
            loss_chunk=train.loss_chunk,
        )

    @property
    def devices(self) -> int:
        """Devices of all stages."""
        return sum(len(stage.devices) for stage in self.stages)

    def lines(self) -> Iterator[str]:
        """The placement for a person."""
        units = sum(len(run.names) for run in self.units)
        yield f"model {self.model}: {self.parameters:,} parameters in {units} units"
        width = max(len(_named(run.names)) for run in self.units)
        for run in self.units:
            many = f"{len(run.names)} x " if len(run.names) > 1 else ""
            shapes = "  ".join(f"{leaf} {shape}" for leaf, shape in run.shapes.items())
            dtypes = ", ".join(sorted(set(run.dtypes.values())))
            yield f"  {_named(run.names):<{width}}  {many}{run.parameters:,} parameters ({dtypes}): {shapes}"
        sequences, tokens = self.microbatch
        about = f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)} of {sequences} x {tokens} tokens"
        about += f", remat {self.remat}" * (self.remat != "none")
        about += f", loss in chunks of {self.loss_chunk} tokens" * (self.loss_chunk > 0)
        if self.layout == "spmd":
            yield f"spmd: {self.devices} device{'s' * (self.devices > 1)}, {about}"
        else:
            yield (
                f"mpmd: {len(self.stages)} stage{'s' * (len(self.stages) > 1)} on {self.devices} devices, "
                f"{self.schedule}, {about}, bubble {self.bubble:.0%} of the step with equal stages"
            )
        for index, stage in enumerate(self.stages):
            yield (
                "  "
                + ("all" if self.layout == "spmd" else f"stage {index}")
                + f" on {_place(stage)}: "
                + _held(stage)
            )
            if stage.whole:
                whole = ", ".join(f"{axis} {size}" for axis, size in stage.whole)
                yield f"    not split, since {stage.degrees} does not divide it: {whole}"

    def to_json(self) -> dict[str, Any]:
        """The placement for scripts."""
        fields = dataclasses.asdict(self)
        for stage, own in zip(fields["stages"], self.stages, strict=True):
            stage["state_bytes"] = own.state_bytes
        return {**fields, "devices": self.devices}


def _place(stage: StagePlacement) -> str:
    first, last = stage.devices[0], stage.devices[-1]
    if first == last:
        return f"device {first}"
    return f"devices {first}-{last} ({stage.degrees})"


def _held(stage: StagePlacement) -> str:
    parts = {
        "parameters": stage.parameter_bytes,
        "gradients": stage.gradient_bytes,
        "optimizer": stage.optimizer_bytes,
    }
    told = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    count = len(stage.units)
    return (
        f"{_named(stage.units)} ({count} unit{'s' * (count > 1)}, {stage.parameters:,} parameters); "
        f"{bytes_text(stage.state_bytes)} a device ({told}) and the activations of at most {stage.in_flight} "
        f"microbatch{'es' * (stage.in_flight > 1)}"
    )


def _named(units: Sequence[str]) -> str:
    return units[0] if len(units) == 1 else f"{units[0]} ... {units[-1]}"


def _units(model: Model) -> Iterator[UnitPlacement]:
    run: list[Unit] = []
    for unit in [*model.units, None]:
        if run and (unit is None or unit.parameters != run[0].parameters):
            shapes = run[0].shapes
            yield UnitPlacement(
                names=tuple(one.name for one in run),
                parameters=run[0].parameter_count(),
                shapes={leaf: list(shape.shape) for leaf, shape in shapes.items()},
                dtypes={leaf: str(shape.dtype) for leaf, shape in shapes.items()},
            )
            run = []
        if unit is not None:
            run.append(unit)


def _stage(step: Step, index: int, degrees: Degrees, devices: tuple[int, ...], in_flight: int) -> StagePlacement:
    mesh = AbstractMesh(tuple(degrees.sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    units = step.stages[index]
    by_name = {unit.name: unit for unit in step.model.units}
    copies = [by_name[other] for (_, other), stage in step.replicas().items() if stage == index]
    own_bytes = sum(_bytes_a_device(abstract_params(unit, mesh)) for unit in units)
    copied_bytes = sum(_bytes_a_device(abstract_params(unit, mesh)) for unit in copies)
    whole = [
        dimension
        for unit in (*units, *copies)
        for parameter in unit.parameters.values()
        for dimension in whole_dimensions(parameter.axes, parameter.shape, degrees.sizes)
    ]
    return StagePlacement(
        devices=devices,
        degrees=degrees,
        units=tuple(unit.name for unit in units),
        parameters=sum(unit.parameter_count() for unit in units),
        parameter_bytes=own_bytes + copied_bytes,
        gradient_bytes=own_bytes + copied_bytes,
        optimizer_bytes=_optimizer_bytes(units, step.optimizer, mesh),
        in_flight=in_flight,
        whole=tuple(dict.fromkeys(whole)),
    )


def _optimizer_bytes(units: Sequence[Unit], optimizer: Optimizer, mesh: AbstractMesh) -> int:
    known: dict[Any, int] = {}
    total = 0
    for unit in units:
        structure = tuple(sorted(unit.parameters.items()))
        if structure not in known:
            known[structure] = _bytes_a_device(abstract_optimizer(unit, optimizer, mesh))
        total += known[structure]
    return total


def _bytes_a_device(tree: Any) -> int:
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize // parts_of(leaf.sharding.spec, dict(leaf.sharding.mesh.shape))
        for leaf in jax.tree.leaves(tree)
    )
