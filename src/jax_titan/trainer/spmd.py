"""SpmdLayout: one mesh, one program, microbatches accumulated by `lax.scan`."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jax_titan.models.unit import Model
from jax_titan.parallel.sharding import BATCH
from jax_titan.trainer.adapters import Step
from jax_titan.trainer.layout import CompileReport
from jax_titan.trainer.microbatches import HostBatch, Microbatches, total_weight
from jax_titan.trainer.optimizer import Optimizer
from jax_titan.trainer.stack import Stacking
from jax_titan.trainer.state import Load, TrainState, abstract_state, first_state


class SpmdLayout:
    """One mesh with the axes of `parallel.mesh` and one jitted step.

    Args:
        model: the chain.
        optimizer: the update rule.
        mesh: the devices.
        microbatches: accumulated before an update.
        batch_shape: [sequences, tokens] of the global batch.
        scan_layers: run alike units by one program, so that compile time does not grow with their number.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        mesh: Mesh,
        microbatches: int,
        batch_shape: tuple[int, int],
        scan_layers: bool = False,
    ):
        self.devices = list(mesh.devices.flat)
        self._model, self._optimizer, self._mesh = model, optimizer, mesh
        self._microbatches = Microbatches(*batch_shape, microbatches, mesh.shape["data"] * mesh.shape["fsdp"])
        self._stacking = Stacking.of(model) if scan_layers else Stacking(model, {})
        self._step = Step.cut(self._stacking.model, optimizer, 1, frozenset(self._stacking.members))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec(None, BATCH))
        self._state = self._abstract_state(self._stacking.model)
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, self._state)
        state = self._shardings["params"], self._shardings["optimizer"]
        self._jitted = jax.jit(self._train, donate_argnums=(0, 1), out_shardings=(*state, self._everywhere))
        self._compiled = None
        self._jitted_gradients = jax.jit(self._mean_gradients)
        self._jitted_evaluate = jax.jit(self._accumulate_loss, out_shardings=self._everywhere)

    def init(self, seed: int, load: Load | None = None) -> TrainState:
        return self.adopt(*first_state(self._model, self._optimizer, seed, self._meshes(self._model), load))

    def compile(self) -> CompileReport:
        start = time.perf_counter()
        lowered = self.lower()
        lowered_at = time.perf_counter()
        self._compiled = lowered.compile()
        end = time.perf_counter()
        return CompileReport(end - start, lowered_at - start, None, end - lowered_at, 1, 0, 0)

    def lower(self) -> jax.stages.Lowered:
        """The step, traced and lowered but not compiled."""
        batch = self._microbatches.shapes((self._microbatches.count,), self._split)
        weight = jax.ShapeDtypeStruct((), self._step.loss_dtype, sharding=self._everywhere)
        return self._jitted.lower(self._state["params"], self._state["optimizer"], batch, weight)

    def step(self, state: TrainState, batch: HostBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        call = self._compiled or self._jitted
        params, optimizer, metrics = call(state.params, state.optimizer, *self._place(batch))
        return TrainState(params, optimizer), metrics

    def gradients(self, state: TrainState, batch: HostBatch) -> tuple[jax.Array, dict[str, Any]]:
        loss, gradients = self._jitted_gradients(state.params, *self._place(batch))
        return loss, self._stacking.split_on_host(gradients)

    def eval_step(self, state: TrainState, batch: HostBatch) -> jax.Array:
        return self._jitted_evaluate(state.params, self._place(batch)[0])

    def state_shardings(self) -> dict[str, Any]:
        return self._abstract_state(self._model)

    def adopt(self, params: Any, optimizer: Any) -> TrainState:
        join = self._stacking.join
        return TrainState(join(params, self._shardings["params"]), join(optimizer, self._shardings["optimizer"]))

    def to_save(self, state: TrainState) -> tuple[Any, Any]:
        split = self._stacking.split_on_host
        return split(state.params), split(state.optimizer)

    def _meshes(self, model: Model) -> dict[str, Mesh]:
        return {unit.name: self._mesh for unit in model.units}

    def _abstract_state(self, model: Model) -> dict[str, Any]:
        return abstract_state(model, self._optimizer, self._meshes(model), frozenset(self._stacking.members))

    def _place(self, batch: HostBatch) -> tuple[dict[str, jax.Array], jax.Array]:
        weight = total_weight(batch, self._step.loss_dtype)
        return (
            jax.device_put(self._microbatches.cut(batch), self._split),
            jax.device_put(weight, self._everywhere),
        )

    def _sums(self, params: Any, batch: Any) -> Any:
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._step.accumulator())
        # Gradients are split as parameters are, while they are summed too.
        gradients = jax.lax.with_sharding_constraint(zeros["gradients"], self._shardings["params"])

        def body(accumulator, microbatch):
            return self._step.accumulate(accumulator, params, {}, [microbatch]), None

        with use_abstract_mesh(self._mesh.abstract_mesh):
            accumulator, _ = jax.lax.scan(body, {**zeros, "gradients": gradients}, batch)
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

        with use_abstract_mesh(self._mesh.abstract_mesh):
            loss_sum, _ = jax.lax.scan(body, jnp.zeros((), self._step.loss_dtype), batch)
        return loss_sum
