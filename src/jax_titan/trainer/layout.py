"""A layout places a chain of units on devices and runs its training step there.

Two of them: `SpmdLayout`, one mesh and one jitted step, and `MpmdLayout`, one program a stage. Both run the same
functions (`adapters.Step`), and with the same seed, data and precision both give the same numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jax_titan.models.unit import Model, Unit, unit_key
from jax_titan.mpmd import schedule as schedules
from jax_titan.mpmd.pipeline import Evaluation, Pipeline, Placed, Replica
from jax_titan.mpmd.topology import Device, Topology
from jax_titan.trainer.adapters import Step
from jax_titan.trainer.optimizer import Optimizer

type HostBatch = Mapping[str, np.ndarray]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params", "optimizer", "workspace"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What training changes.

    Attributes:
        params, optimizer: by unit name: what a checkpoint holds, the same for every layout.
        workspace: the layout's own: accumulators and replicas, which it can make anew from the rest.
    """

    params: Any
    optimizer: Any
    workspace: Any = None


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What getting ready cost, in seconds (None: not told apart), and the counts that describe the result."""

    seconds: float
    lower_seconds: float | None
    partition_seconds: float | None
    xla_seconds: float | None
    fragments: int
    transfers_per_step: int
    transfers_per_microbatch: int


class Layout(Protocol):
    """Turns a chain of units into a train step."""

    devices: list[Device]

    def init(self, seed: int) -> TrainState:
        """A fresh state, every unit born where it lives."""
        ...

    def compile(self) -> CompileReport:
        """Make the step ready to run; called once, before the first step."""
        ...

    def step(self, state: TrainState, batch: HostBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step over a global batch of [B, T] arrays; uses up the state given in.

        Returns:
            The next state, and `loss` and `grad_norm` as arrays that are still being computed.
        """
        ...

    def gradients(self, state: TrainState, batch: HostBatch) -> tuple[jax.Array, dict[str, Any]]:
        """The mean loss of a batch and its gradient by unit; the state stays usable."""
        ...

    def eval_step(self, state: TrainState, batch: HostBatch) -> jax.Array:
        """The summed loss of a batch; the state stays usable."""
        ...

    def state_shardings(self) -> dict[str, Any]:
        """Abstract `params` and `optimizer` with the sharding of every leaf: what a checkpoint is read into."""
        ...

    def adopt(self, params: Any, optimizer: Any) -> TrainState:
        """A state from restored parameters and optimizer state."""
        ...

    def describe(self) -> list[str]:
        """What lives where, in a few lines."""
        ...


class SpmdLayout:
    """One mesh with a data axis and one jitted step; microbatches are accumulated by `lax.scan`.

    Args:
        model: the chain.
        optimizer: the update rule.
        devices: the mesh; each computes its share of every microbatch.
        microbatches: accumulated before an update.
        batch_shape: [sequences, tokens] of the global batch.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        devices: Sequence[Device],
        microbatches: int,
        batch_shape: tuple[int, int],
    ):
        _check_batch_shape(batch_shape, microbatches, len(devices))
        self.devices = list(devices)
        self.microbatches = microbatches
        self._step = Step.cut(model, optimizer, 1)
        self._batch_shape = batch_shape
        mesh = Mesh(np.array(self.devices), ("data",))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec(None, "data"))
        self._jitted = jax.jit(
            self._train,
            donate_argnums=(0, 1),
            out_shardings=(self._everywhere, self._everywhere, self._everywhere),
        )
        self._compiled = None
        self._jitted_gradients = jax.jit(self._mean_gradients)
        self._jitted_evaluate = jax.jit(self._accumulate_loss)

    def init(self, seed: int) -> TrainState:
        return TrainState(*_first_state(self._step, seed, self._homes()))

    def compile(self) -> CompileReport:
        start = time.perf_counter()
        state = self.state_shardings()
        batch = {
            name: jax.ShapeDtypeStruct(
                (self.microbatches, self._batch_shape[0] // self.microbatches, self._batch_shape[1]),
                dtype,
                sharding=self._split,
            )
            for name, dtype in BATCH_DTYPES.items()
        }
        weight = jax.ShapeDtypeStruct((), self._weight_dtype, sharding=self._everywhere)
        lowered = self._jitted.lower(state["params"], state["optimizer"], batch, weight)
        lowered_at = time.perf_counter()
        self._compiled = lowered.compile()
        end = time.perf_counter()
        return CompileReport(end - start, lowered_at - start, None, end - lowered_at, 1, 0, 0)

    def step(self, state: TrainState, batch: HostBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        call = self._compiled or self._jitted
        params, optimizer, metrics = call(state.params, state.optimizer, *self._place(batch))
        return TrainState(params, optimizer), metrics

    def gradients(self, state: TrainState, batch: HostBatch) -> tuple[jax.Array, dict[str, Any]]:
        return self._jitted_gradients(state.params, *self._place(batch))

    def eval_step(self, state: TrainState, batch: HostBatch) -> jax.Array:
        return self._jitted_evaluate(state.params, self._place(batch)[0])

    def state_shardings(self) -> dict[str, Any]:
        return _abstract_state(self._step, self._homes())

    def adopt(self, params: Any, optimizer: Any) -> TrainState:
        return TrainState(params, optimizer)

    def describe(self) -> list[str]:
        count = len(self.devices)
        return [
            f"spmd: {len(self._step.model.units)} units on {count} device{'s' * (count > 1)} "
            f"({self.devices[0].device_kind}), {self.microbatches} microbatches accumulated"
        ]

    def _homes(self) -> dict[str, jax.sharding.Sharding]:
        return {unit.name: self._everywhere for unit in self._step.model.units}

    @property
    def _weight_dtype(self):
        return _weight_dtype(self._step)

    def _place(self, batch: HostBatch) -> tuple[dict[str, jax.Array], jax.Array]:
        stacked = {
            name: np.stack(parts)
            for name, parts in _microbatches(batch, self.microbatches, self._batch_shape).items()
        }
        weight = _total_weight(batch, self._weight_dtype)
        return jax.device_put(stacked, self._split), jax.device_put(weight, self._everywhere)

    def _sums(self, params: Any, batch: Any) -> Any:
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._step.accumulator())

        def body(accumulator, microbatch):
            return self._step.accumulate(accumulator, params, {}, [microbatch]), None

        accumulator, _ = jax.lax.scan(body, zeros, batch)
        return accumulator

    def _train(self, params: Any, optimizer: Any, batch: Any, weight: jax.Array) -> Any:
        sums = self._sums(params, batch)
        params, optimizer, _, metrics = self._step.update(params, optimizer, sums, [weight])
        return params, optimizer, metrics

    def _mean_gradients(self, params: Any, batch: Any, weight: jax.Array) -> Any:
        sums = self._sums(params, batch)
        mean = jax.tree.map(lambda x: x / weight.astype(x.dtype), sums["gradients"])
        return sums["loss"] / weight.astype(sums["loss"].dtype), mean

    def _accumulate_loss(self, params: Any, batch: Any) -> jax.Array:
        def body(loss_sum, microbatch):
            return self._step.evaluate(loss_sum, params, {}, [microbatch]), None

        loss_sum, _ = jax.lax.scan(body, jnp.zeros((), self._weight_dtype), batch)
        return loss_sum


class MpmdLayout:
    """One program a stage, run by one controller under a pipeline schedule.

    Args:
        model: the chain; cut into stages of balanced cost.
        optimizer: the update rule.
        devices: one for each stage.
        schedule: its name.
        microbatches: of a step.
        batch_shape: [sequences, tokens] of the global batch.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        devices: Sequence[Device],
        schedule: str,
        microbatches: int,
        batch_shape: tuple[int, int],
    ):
        _check_batch_shape(batch_shape, microbatches)
        self.devices = list(devices)
        self.microbatches = microbatches
        self._step = Step.cut(model, optimizer, len(self.devices))
        self._topology = Topology.one_device_a_stage(self.devices)
        self._mesh_names = list(self._topology.meshes)
        self.schedule = schedules.build(schedule, len(self.devices), microbatches)
        self._batch_shape = batch_shape
        self._pipeline: Pipeline | None = None
        self._evaluation: Evaluation | None = None

    @property
    def pipeline(self) -> Pipeline:
        """The cut and compiled step, made when first asked for."""
        if self._pipeline is None:
            self.compile()
        assert self._pipeline is not None
        return self._pipeline

    def compile(self) -> CompileReport:
        start = time.perf_counter()
        shapes = _abstract_state(self._step, {unit.name: None for unit in self._step.model.units})
        by_unit = self._by_unit()
        last = self._mesh_names[-1]
        scalar = jax.ShapeDtypeStruct((), _weight_dtype(self._step))
        self._pipeline = Pipeline(
            self._step.accumulate,
            self._step.update,
            self._topology,
            self.schedule,
            accumulator=Placed(
                self._step.accumulator(),
                {
                    "loss": last,
                    "gradients": by_unit,
                    "replicas": {f"{a}/{b}": self._mesh_names[s] for (a, b), s in self._step.replicas().items()},
                },
            ),
            parameters=Placed(shapes["params"], by_unit),
            optimizer=Placed(shapes["optimizer"], by_unit),
            scalars=Placed([scalar] * len(self._mesh_names), self._mesh_names),
            microbatch=self._microbatch_shapes(),
            metrics_mesh=last,
            replicas={
                f"{unit}/{other}": Replica(functools.partial(_select, other), self._mesh_names[s])
                for (unit, other), s in self._step.replicas().items()
            },
        )
        report = self._pipeline.report
        return CompileReport(
            time.perf_counter() - start,
            report.lower_seconds,
            report.partition_seconds,
            report.compile_seconds,
            report.fragments,
            report.transfers_per_step,
            report.transfers_per_microbatch,
        )

    def init(self, seed: int) -> TrainState:
        return self.adopt(*_first_state(self._step, seed, self._homes()))

    def adopt(self, params: Any, optimizer: Any) -> TrainState:
        return TrainState(params, optimizer, (self._zero_accumulator(), self.pipeline.replicate(params)))

    def step(self, state: TrainState, batch: HostBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        return self.inspect_step(state, batch, None)

    def inspect_step(self, state: TrainState, batch: HostBatch, after_task: Any) -> Any:
        """`step`, calling `after_task(task, table of slots)` after each task of the schedule."""
        accumulator, replicas = state.workspace
        params, replicas, optimizer, accumulator, metrics = self.pipeline.step(
            state.params,
            replicas,
            state.optimizer,
            accumulator,
            [_total_weight(batch, _weight_dtype(self._step))] * len(self.devices),
            self._host_microbatches(batch),
            after_task,
        )
        return TrainState(params, optimizer, (accumulator, replicas)), metrics

    def gradients(self, state: TrainState, batch: HostBatch) -> tuple[jax.Array, dict[str, Any]]:
        _, replicas = state.workspace
        sums = self.pipeline.accumulate(
            state.params, replicas, self._zero_accumulator(), self._host_microbatches(batch)
        )
        weight = _total_weight(batch, _weight_dtype(self._step))
        for name, more in sums["replicas"].items():
            owner = name.rsplit("/", 1)[1]
            home = SingleDeviceSharding(self._device_of(owner))
            sums["gradients"][owner] = jax.tree.map(jnp.add, sums["gradients"][owner], jax.device_put(more, home))
        return sums["loss"] / weight, jax.tree.map(lambda x: x / weight.astype(x.dtype), sums["gradients"])

    def eval_step(self, state: TrainState, batch: HostBatch) -> jax.Array:
        if self._evaluation is None:
            self._evaluation = Evaluation(
                self._step.evaluate,
                self.pipeline,
                accumulator=Placed(jax.ShapeDtypeStruct((), _weight_dtype(self._step)), self._mesh_names[-1]),
                microbatch=self._microbatch_shapes(),
                microbatches=self.microbatches,
            )
        _, replicas = state.workspace
        zero = np.zeros((), _weight_dtype(self._step))
        return self._evaluation.run(state.params, replicas, zero, self._host_microbatches(batch))

    def state_shardings(self) -> dict[str, Any]:
        return _abstract_state(self._step, self._homes())

    def describe(self) -> list[str]:
        timeline = schedules.simulate(self.schedule)
        lines = [
            f"mpmd: {len(self.devices)} stages, {self.schedule.name}, {self.microbatches} microbatches, "
            f"bubble {1 - timeline.busy / timeline.makespan:.0%} of the step with equal stages"
        ]
        for index, units in enumerate(self._step.stages):
            count = sum(unit.parameter_count() for unit in units)
            named = units[0].name if len(units) == 1 else f"{units[0].name} ... {units[-1].name}"
            lines.append(
                f"  stage {index} on {self.devices[index]}: {named} ({len(units)} unit{'s' * (len(units) > 1)}, "
                f"{count:,} parameters), at most {timeline.peak_activations[index]} microbatches in flight"
            )
        return lines

    def _homes(self) -> dict[str, jax.sharding.Sharding]:
        return {unit.name: SingleDeviceSharding(self._device_of(unit.name)) for unit in self._step.model.units}

    def _by_unit(self) -> dict[str, str]:
        return {name: self._mesh_names[s] for name, s in self._step.stage_of.items()}

    def _device_of(self, unit: str) -> Device:
        return self.devices[self._step.stage_of[unit]]

    def _microbatch_shapes(self) -> Placed:
        shape = (self._batch_shape[0] // self.microbatches, self._batch_shape[1])
        fields = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in BATCH_DTYPES.items()}
        return Placed([fields] * len(self._mesh_names), self._mesh_names)

    def _host_microbatches(self, batch: HostBatch) -> list[Any]:
        parts = _microbatches(batch, self.microbatches, self._batch_shape)
        return [
            [{name: arrays[m] for name, arrays in parts.items()}] * len(self.devices)
            for m in range(self.microbatches)
        ]

    def _zero_accumulator(self) -> Any:
        shapes = self._step.accumulator()
        homes = {
            "loss": self.devices[-1],
            "gradients": {unit.name: self._device_of(unit.name) for unit in self._step.model.units},
            "replicas": {f"{a}/{b}": self.devices[s] for (a, b), s in self._step.replicas().items()},
        }
        return jax.tree.map(
            lambda home, some: jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype, device=home), some),
            homes,
            shapes,
            is_leaf=lambda x: isinstance(x, jax.Device),
        )


BATCH_DTYPES: Mapping[str, Any] = {
    "tokens": np.int32,
    "targets": np.int32,
    "segments": np.int32,
    "positions": np.int32,
    "weights": np.float32,
}


def _select(name: str, params: Any) -> Any:
    return params[name]


def _weight_dtype(step: Step) -> Any:
    return step.accumulator()["loss"].dtype


def _total_weight(batch: HostBatch, dtype: Any) -> np.ndarray:
    """Known on the host, so no device has to send it; a batch without targets divides by one."""
    total = float(np.sum(batch["weights"], dtype=np.float64))
    return np.asarray(total if total > 0 else 1.0, dtype)


def _microbatches(batch: HostBatch, count: int, shape: tuple[int, int]) -> dict[str, list[np.ndarray]]:
    for name in BATCH_DTYPES:
        if np.shape(batch[name]) != shape:
            raise ValueError(f"batch[{name!r}] is {np.shape(batch[name])}; this layout was built for {shape}")
    return {name: np.split(np.asarray(batch[name], dtype), count) for name, dtype in BATCH_DTYPES.items()}


def _check_batch_shape(shape: tuple[int, int], microbatches: int, parts: int = 1) -> None:
    if microbatches < 1 or shape[0] % (microbatches * parts):
        raise ValueError(
            f"{shape[0]} sequences cannot be cut into {microbatches} equal microbatches for {parts} devices each"
        )


# Initialisation runs once, so compiling it fast matters more than running it fast.
_COMPILE_FAST = {"xla_backend_optimization_level": 0}


def _first_state(step: Step, seed: int, homes: Mapping[str, jax.sharding.Sharding]) -> tuple[dict, dict]:
    """First parameters and optimizer state by unit, computed on the devices that will hold them."""

    def lowered(unit: Unit) -> jax.stages.Lowered:
        def first(key):
            params = unit.init(key)
            return params, step.optimizer.transformation.init(params)

        home = homes[unit.name]
        return jax.jit(first, out_shardings=home).lower(jax.device_put(jax.random.key(seed), home))

    # One program for all units of the same structure and home. Traced here, since settings such as x64 belong to
    # this thread; compiled two at a time.
    alike = {unit.name: (*sorted(unit.parameters.items()), homes[unit.name]) for unit in step.model.units}
    units = {alike[unit.name]: unit for unit in step.model.units}
    programs = {structure: lowered(unit) for structure, unit in units.items()}
    with ThreadPoolExecutor(max_workers=2) as pool:
        ready = pool.map(lambda program: program.compile(_COMPILE_FAST), programs.values())
        compiled = dict(zip(programs, ready, strict=True))
    params, optimizer = {}, {}
    for unit in step.model.units:
        key = jax.device_put(unit_key(jax.random.key(seed), unit.name), homes[unit.name])
        params[unit.name], optimizer[unit.name] = compiled[alike[unit.name]](key)
    return params, optimizer


def _abstract_state(step: Step, homes: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes of `params` and `optimizer` by unit, with the sharding of each unit's home."""
    result: dict[str, Any] = {"params": {}, "optimizer": {}}
    for unit in step.model.units:

        def placed(shape, home=homes[unit.name]):
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=home)

        shapes = unit.shapes
        result["params"][unit.name] = jax.tree.map(placed, shapes)
        state = jax.eval_shape(step.optimizer.transformation.init, shapes)
        result["optimizer"][unit.name] = jax.tree.map(placed, state)
    return result
