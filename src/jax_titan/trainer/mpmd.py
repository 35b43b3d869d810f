"""MpmdLayout: one program a stage, each stage on a mesh of its own, run by one controller under a schedule."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_titan.models.unit import Model
from jax_titan.mpmd import schedule as schedules
from jax_titan.mpmd.pipeline import Evaluation, Pipeline, Placed, Replica
from jax_titan.mpmd.topology import Topology
from jax_titan.parallel.sharding import BATCH
from jax_titan.trainer.adapters import Step
from jax_titan.trainer.layout import CompileReport
from jax_titan.trainer.microbatches import HostBatch, Microbatches, total_weight
from jax_titan.trainer.optimizer import Optimizer
from jax_titan.trainer.state import Load, TrainState, abstract_params, abstract_state, first_state


class MpmdLayout:
    """One program a stage, run by one controller under a pipeline schedule.

    Args:
        model: the chain; cut into stages of balanced cost.
        optimizer: the update rule.
        meshes: one for each stage, with the axes of `parallel.mesh`; their sizes may differ.
        schedule: its name.
        microbatches: of a step.
        batch_shape: [sequences, tokens] of the global batch.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        meshes: Sequence[Mesh],
        schedule: str,
        microbatches: int,
        batch_shape: tuple[int, int],
    ):
        self.devices = [device for mesh in meshes for device in mesh.devices.flat]
        for mesh in meshes:
            self._microbatches = Microbatches(*batch_shape, microbatches, mesh.shape["data"] * mesh.shape["fsdp"])
        self.stages = len(meshes)
        self._model, self._optimizer, self._meshes = model, optimizer, list(meshes)
        self._step = Step.cut(model, optimizer, self.stages)
        self._topology = Topology.of_stages(meshes)
        self._mesh_names = list(self._topology.meshes)
        self.schedule = schedules.build(schedule, self.stages, microbatches)
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
        state = self.state_shardings()
        by_unit = self._by_unit()
        last = self._mesh_names[-1]
        scalar = jax.ShapeDtypeStruct((), self._step.loss_dtype)
        self._pipeline = Pipeline(
            self._step.accumulate,
            self._step.update,
            self._topology,
            self.schedule,
            accumulator=Placed(
                self._abstract_accumulator(),
                {
                    "loss": last,
                    "gradients": by_unit,
                    "replicas": {f"{a}/{b}": self._mesh_names[s] for (a, b), s in self._step.replicas().items()},
                },
            ),
            parameters=Placed(state["params"], by_unit),
            optimizer=Placed(state["optimizer"], by_unit),
            scalars=Placed([scalar] * self.stages, self._mesh_names),
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

    def init(self, seed: int, load: Load | None = None) -> TrainState:
        return self.adopt(*first_state(self._model, self._optimizer, seed, self._homes(), load))

    def adopt(self, params: Any, optimizer: Any) -> TrainState:
        return TrainState(params, optimizer, (self._zero_accumulator(), self.pipeline.replicate(params)))

    def to_save(self, state: TrainState) -> tuple[Any, Any]:
        return state.params, state.optimizer

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
            [total_weight(batch, self._step.loss_dtype)] * self.stages,
            self._host_microbatches(batch),
            after_task,
        )
        return TrainState(params, optimizer, (accumulator, replicas)), metrics

    def gradients(self, state: TrainState, batch: HostBatch) -> tuple[jax.Array, dict[str, Any]]:
        _, replicas = state.workspace
        sums = self.pipeline.accumulate(
            state.params, replicas, self._zero_accumulator(), self._host_microbatches(batch)
        )
        weight = total_weight(batch, self._step.loss_dtype)
        for name, more in sums["replicas"].items():
            owner = name.rsplit("/", 1)[1]
            home = jax.tree.map(lambda leaf: leaf.sharding, sums["gradients"][owner])
            sums["gradients"][owner] = jax.tree.map(jnp.add, sums["gradients"][owner], jax.device_put(more, home))
        return sums["loss"] / weight, jax.tree.map(lambda x: x / weight.astype(x.dtype), sums["gradients"])

    def eval_step(self, state: TrainState, batch: HostBatch) -> jax.Array:
        if self._evaluation is None:
            self._evaluation = Evaluation(
                self._step.evaluate,
                self.pipeline,
                accumulator=Placed(jax.ShapeDtypeStruct((), self._step.loss_dtype), self._mesh_names[-1]),
                microbatch=self._microbatch_shapes(),
                microbatches=self._microbatches.count,
            )
        _, replicas = state.workspace
        zero = np.zeros((), self._step.loss_dtype)
        return self._evaluation.run(state.params, replicas, zero, self._host_microbatches(batch))

    def state_shardings(self) -> dict[str, Any]:
        return abstract_state(self._model, self._optimizer, self._homes())

    def _homes(self) -> dict[str, Mesh]:
        return {name: self._meshes[stage] for name, stage in self._step.stage_of.items()}

    def _by_unit(self) -> dict[str, str]:
        return {name: self._mesh_names[s] for name, s in self._step.stage_of.items()}

    def _microbatch_shapes(self) -> Placed:
        split = [NamedSharding(mesh, PartitionSpec(BATCH)) for mesh in self._meshes]
        return Placed([self._microbatches.shapes(sharding=s) for s in split], self._mesh_names)

    def _host_microbatches(self, batch: HostBatch) -> list[Any]:
        parts = self._microbatches.cut(batch)
        return [
            [{name: arrays[m] for name, arrays in parts.items()}] * self.stages
            for m in range(self._microbatches.count)
        ]

    def _abstract_accumulator(self) -> Any:
        """What one step sums, each gradient split as its parameter is on the stage that computes it."""
        units = {unit.name: unit for unit in self._model.units}
        homes = self._homes()
        return {
            "loss": jax.ShapeDtypeStruct(
                (), self._step.loss_dtype, sharding=NamedSharding(self._meshes[-1], PartitionSpec())
            ),
            "gradients": {name: abstract_params(unit, homes[name]) for name, unit in units.items()},
            "replicas": {
                f"{a}/{b}": abstract_params(units[b], self._meshes[s])
                for (a, b), s in self._step.replicas().items()
            },
        }

    def _zero_accumulator(self) -> Any:
        return jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), self._abstract_accumulator()
        )


def _select(name: str, params: Any) -> Any:
    return params[name]
