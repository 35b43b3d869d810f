"""What a layout is: a chain of units placed on devices, and its training step run there.

Two of them: `spmd.SpmdLayout`, one mesh and one jitted step, and `mpmd.MpmdLayout`, one program a stage, each
stage on a mesh of its own. Both run the same functions (`adapters.Step`), and with the same seed, data and
precision both give the same numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from jax_titan.mpmd.topology import Device
from jax_titan.trainer.microbatches import HostBatch
from jax_titan.trainer.state import Load, TrainState


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

    def init(self, seed: int, load: Load | None = None) -> TrainState:
        """A fresh state, every unit born where it lives; with `load` from parameters that it reads."""
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
        """A state from restored parameters and optimizer state, which are used up."""
        ...

    def to_save(self, state: TrainState) -> tuple[Any, Any]:
        """Parameters and optimizer state by unit of the model, as a checkpoint holds them."""
        ...
