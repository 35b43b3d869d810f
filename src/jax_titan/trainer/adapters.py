"""From a model, a cut of its chain and an optimizer to the functions that a layout runs.

The functions are single-device functions with named parts. `SpmdLayout` jits them as they are, `MpmdLayout` has
them cut at the names: there is one definition of what a training step computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_titan.models.unit import Model, Unit
from jax_titan.mpmd.annotate import stage
from jax_titan.trainer.optimizer import Optimizer, sum_of_squares

type ByUnit = Mapping[str, Any]


def cut_chain(costs: Sequence[float], stages: int) -> list[int]:
    """Cut a chain into consecutive pieces so that the dearest piece is as cheap as possible.

    Args:
        costs: of each unit.
        stages: number of pieces, at most as many as units.

    Returns:
        The number of units of each piece, each at least 1. Among equal cuts the one that also keeps the
        remaining pieces even.

    Raises:
        ValueError: more pieces than units, or fewer than one.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} units cannot be cut into {stages} stages")
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    # best[k][n]: (dearest piece, sum of squares, start of the last piece) of the first n units in k pieces
    best = [[(float("inf"), float("inf"), 0)] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0.0, 0)
    for k in range(1, stages + 1):
        for n in range(k, count + 1):
            best[k][n] = min(
                (
                    max(best[k - 1][m][0], prefix[n] - prefix[m]),
                    best[k - 1][m][1] + (prefix[n] - prefix[m]) ** 2,
                    m,
                )
                for m in range(k - 1, n)
            )
    sizes, end = [], count
    for k in range(stages, 0, -1):
        start = best[k][end][2]
        sizes.append(end - start)
        end = start
    return sizes[::-1]


@dataclasses.dataclass(frozen=True)
class Step:
    """What one training step computes, for a chain cut into stages.

    Attributes:
        model: the chain.
        stages: its units, by stage.
        optimizer: the rule of the update.
        stacked: names of the units that stand for several, whose leaves have one dimension more (`stack`).
    """

    model: Model
    stages: tuple[tuple[Unit, ...], ...]
    optimizer: Optimizer
    stacked: frozenset[str] = frozenset()

    @classmethod
    def cut(cls, model: Model, optimizer: Optimizer, stages: int, stacked: frozenset[str] = frozenset()) -> Step:
        sizes = cut_chain([unit.cost for unit in model.units], stages)
        units = iter(model.units)
        return cls(model, tuple(tuple(next(units) for _ in range(size)) for size in sizes), optimizer, stacked)

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of each unit."""
        return {unit.name: s for s, units in enumerate(self.stages) for unit in units}

    def replicas(self) -> dict[tuple[str, str], int]:
        """(unit, shared unit) -> stage, for parameters that a unit reuses from another stage."""
        of = self.stage_of
        return {
            (unit.name, other): of[unit.name]
            for unit in self.model.units
            for other in unit.shares
            if of[other] != of[unit.name]
        }

    def stage_name(self, index: int) -> str:
        return f"stage{index}"

    def accumulator(self) -> Any:
        """Shapes of what one step accumulates: a loss sum, gradients by unit, and gradients of replicas."""
        shapes = self.model.shapes
        return {
            "loss": jax.ShapeDtypeStruct((), self.loss_dtype),
            "gradients": shapes,
            "replicas": {f"{unit}/{other}": shapes[other] for unit, other in self.replicas()},
        }

    @property
    def loss_dtype(self) -> Any:
        """What losses, and sums of weights, are accumulated in."""
        leaves = jax.tree.leaves(self.model.shapes)
        return jnp.promote_types(jnp.float32, leaves[0].dtype)

    def loss(self, params: ByUnit, replicas: ByUnit, batches: Sequence[Any]) -> Any:
        """The summed loss of one microbatch.

        Args:
            params: by unit.
            replicas: by "unit/shared unit": the copy that the unit reads instead.
            batches: one a stage: every stage gets its own copy of the batch from the host.
        """
        carry = None
        for index, units in enumerate(self.stages):

            def run(own, shared, carry, batch, units=units):
                for unit in units:
                    carry = unit.apply(own[unit.name], shared[unit.name], carry, batch)
                return carry

            own = {unit.name: params[unit.name] for unit in units}
            shared = {
                unit.name: {other: replicas.get(f"{unit.name}/{other}", params[other]) for other in unit.shares}
                for unit in units
            }
            carry = stage(self.stage_name(index))(run)(own, shared, carry, batches[index])
        loss_sum, _, _ = carry  # pyright: ignore
        return loss_sum

    def accumulate(self, accumulator: Any, params: ByUnit, replicas: ByUnit, batches: Sequence[Any]) -> Any:
        """Add one microbatch's loss and gradients to the accumulator."""
        loss, (gradients, of_replicas) = jax.value_and_grad(self.loss, argnums=(0, 1))(params, replicas, batches)
        return jax.tree.map(jnp.add, accumulator, {"loss": loss, "gradients": gradients, "replicas": of_replicas})

    def evaluate(self, loss_sum: jax.Array, params: ByUnit, replicas: ByUnit, batches: Sequence[Any]) -> jax.Array:
        """Add one microbatch's loss."""
        return loss_sum + self.loss(params, replicas, batches)

    def update(self, params: ByUnit, optimizer: ByUnit, accumulator: Any, weights: Sequence[Any]) -> Any:
        """One optimizer update from an accumulator.

        The global norm is one scalar a stage to the last stage and one back, whatever the number of leaves.

        Args:
            params, optimizer: by unit.
            accumulator: sums over all microbatches.
            weights: the total weight of the global batch, one scalar a stage.

        Returns:
            params, optimizer, a zeroed accumulator, metrics (loss and grad_norm of this step).
        """
        last = len(self.stages) - 1
        owners = self.stage_of
        gradients, squares = [], []
        for index, units in enumerate(self.stages):

            def prepare(sums, of_replicas, weight):
                for name, more in of_replicas.items():
                    other = name.rsplit("/", 1)[1]
                    sums = {**sums, other: jax.tree.map(jnp.add, sums[other], more)}
                mean = jax.tree.map(lambda x: x / weight.astype(x.dtype), sums)
                return mean, sum_of_squares(mean)

            sums = {unit.name: accumulator["gradients"][unit.name] for unit in units}
            incoming = {
                name: tree
                for name, tree in accumulator["replicas"].items()
                if owners[name.rsplit("/", 1)[1]] == index
            }
            mean, square = stage(self.stage_name(index))(prepare)(sums, incoming, weights[index])
            gradients.append(mean)
            squares.append(square)

        def combine(squares, loss, weight):
            norm = jnp.sqrt(sum(squares[1:], start=squares[0]))
            return norm, loss / weight.astype(loss.dtype)

        norm, loss = stage(self.stage_name(last))(combine)(squares, accumulator["loss"], weights[last])
        new_params, new_optimizer = {}, {}
        zeros = {"loss": None, "gradients": {}, "replicas": {}}
        for index, units in enumerate(self.stages):

            def apply(params, optimizer, gradients, norm, spent):
                factor = self.optimizer.clip_factor(norm)
                if factor is not None:
                    gradients = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)
                results = {}
                for name in params:
                    results[name] = self._updated(name, params[name], optimizer[name], gradients[name])
                return (
                    {name: result[0] for name, result in results.items()},
                    {name: result[1] for name, result in results.items()},
                    jax.tree.map(_emptied, gradients),
                    jax.tree.map(_emptied, spent),
                )

            names = [unit.name for unit in units]
            spent = {
                name: tree
                for name, tree in accumulator["replicas"].items()
                if owners[name.rsplit("/", 1)[0]] == index
            }
            if index == last:
                spent = {"loss": accumulator["loss"], **spent}
            some_params, some_optimizer, zero_gradients, zero_spent = stage(self.stage_name(index))(apply)(
                {name: params[name] for name in names},
                {name: optimizer[name] for name in names},
                gradients[index],
                norm,
                spent,
            )
            new_params |= some_params
            new_optimizer |= some_optimizer
            zeros["gradients"] |= zero_gradients
            if index == last:
                zeros["loss"] = zero_spent.pop("loss")
            zeros["replicas"] |= zero_spent
        return new_params, new_optimizer, zeros, {"loss": loss, "grad_norm": norm}

    def _updated(self, name: str, params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        """One unit's next parameters and optimizer state."""

        def one(params, state, gradients):
            updates, state = self.optimizer.transformation.update(gradients, state, params)
            return jax.tree.map(_add_update, params, updates), state

        # The rule must see each of the stacked units by itself: what decays depends on a leaf's dimensions.
        return (jax.vmap(one) if name in self.stacked else one)(params, state, gradients)


def _emptied(spent: jax.Array) -> jax.Array:
    """Zeros in the memory of an array that was read for the last time.

    The barrier ties them to that array: as constants, equal ones would become one array with two names, and the
    next step could not overwrite both.
    """
    return jax.lax.optimization_barrier((spent, jnp.zeros_like(spent)))[1]


def _add_update(parameter: jax.Array, update: jax.Array) -> jax.Array:
    return (parameter + update).astype(parameter.dtype)
