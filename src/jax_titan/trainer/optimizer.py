"""The optimizer: AdamW with a learning-rate schedule, one optax state for each unit of the model.

Keeping the state by unit is what lets any layout place it beside the unit's parameters and any checkpoint restore
it onto another cut. Clipping by the global norm needs all units together, so it is a factor that the caller works
out (`clip_factor`) and applies to the gradients.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """What turns one unit's gradients into its next parameters.

    Attributes:
        transformation: of one unit's parameters.
        learning_rate: by number of updates made.
        clip_norm: global norm beyond which gradients are scaled down; 0 never.
    """

    transformation: optax.GradientTransformation
    learning_rate: optax.Schedule
    clip_norm: float

    def clip_factor(self, norm: jax.Array) -> jax.Array | None:
        """What to scale gradients of this global norm by; None when they are never clipped."""
        if not self.clip_norm:
            return None
        return jnp.where(norm > self.clip_norm, self.clip_norm / norm, jnp.ones_like(norm))


def adamw(
    *,
    learning_rate: float,
    schedule: str,
    steps: int,
    warmup_steps: int,
    final_fraction: float,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    clip_norm: float,
    state_dtype: str = "float32",
) -> Optimizer:
    """AdamW; weights of one dimension (norms) do not decay.

    Args:
        learning_rate: at the peak.
        schedule: "cosine" falls to `final_fraction` of the peak at the last step, "constant" stays.
        steps: length of the run.
        warmup_steps: linear rise from 0; the first update already moves.
        b1, b2, eps, weight_decay: AdamW's, decoupled decay (arXiv 1711.05101).
        clip_norm: global gradient norm; 0 never clips.
        state_dtype: of the two means between steps, "float32" or "bfloat16"; wider parameters keep their own.
    """
    if schedule == "cosine":
        after = optax.cosine_decay_schedule(learning_rate, max(1, steps - warmup_steps), final_fraction)
    else:
        after = optax.constant_schedule(learning_rate)
    rate = after
    if warmup_steps:
        # Update 0 gets 1/warmup of the peak rather than nothing.
        rise = optax.linear_schedule(learning_rate / warmup_steps, learning_rate, max(1, warmup_steps - 1))
        rate = optax.join_schedules([rise, after], [warmup_steps])
    transformation = optax.adamw(
        rate,
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
    )
    if state_dtype != "float32":
        transformation = _stored_as(transformation, state_dtype)
    return Optimizer(transformation, rate, clip_norm)


def _stored_as(inner: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """A transformation whose float32 state is kept in a narrower format; it computes in float32 all the same."""

    def cast(tree, source, target):
        return jax.tree.map(lambda x: x.astype(target) if x.dtype == source else x, tree)

    def init(params):
        return cast(inner.init(params), jnp.float32, dtype)

    def update(updates, state, params=None):
        updates, state = inner.update(updates, cast(state, dtype, jnp.float32), params)
        return updates, cast(state, jnp.float32, dtype)

    return optax.GradientTransformation(init, update)


class RateTable:
    """Learning rates by number of updates made, worked out a block at a time.

    One at a time they would queue on a device behind the very step whose record wants them.
    """

    _BLOCK = 4096

    def __init__(self, schedule: optax.Schedule):
        self._schedule = jax.jit(jax.vmap(schedule))
        self._known: tuple[int, np.ndarray] | None = None

    def __getitem__(self, updates: int) -> float:
        block, position = divmod(updates, self._BLOCK)
        if self._known is None or self._known[0] != block:
            self._known = block, np.asarray(self._schedule(np.arange(self._BLOCK) + block * self._BLOCK))
        return float(self._known[1][position])


def sum_of_squares(tree) -> jax.Array:
    """Sum over all leaves; its root over all units is the global norm."""
    return sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)), start=jnp.zeros(()))
