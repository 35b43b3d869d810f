"""What the tests of layouts share: the demo's model, batches with hard masks, and a run of a few steps."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_titan.config import load
from jax_titan.parallel.mesh import Degrees, make_mesh
from jax_titan.trainer.build import build_model, build_optimizer
from jax_titan.trainer.mpmd import MpmdLayout
from jax_titan.trainer.spmd import SpmdLayout

BATCH = 24


def demo_model(tied: bool, dtype: Any, **changes):
    """The model of the preset llama3-debug, with a fixed vocabulary; `changes` are fields of its sections."""
    config = load("llama3-debug", [])
    length = changes.pop("sequence_length", config.train.sequence_length)
    train = dataclasses.replace(
        config.train, sequence_length=length, loss_chunk=changes.pop("loss_chunk", config.train.loss_chunk)
    )
    model = dataclasses.replace(config.model, tied=tied, dtype=dtype, **changes)
    return build_model(dataclasses.replace(config, model=model, train=train), config.data.vocab_size)


def demo_optimizer(steps: int = 20):
    config = load("llama3-debug", [])
    return build_optimizer(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps)))


def batch(seed: int, vocab_size: int, length: int, sequences: int = BATCH) -> dict[str, Any]:
    """Random tokens in packed documents, with padding, and weights that differ wildly between rows."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, vocab_size, (sequences, length))
    starts = generator.random((sequences, length)) < 3 / length
    starts[:, 0] = True
    segments = np.cumsum(starts, axis=1)
    index = np.arange(length)[None]
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    kept = generator.random((sequences, length)) < generator.random((sequences, 1)) ** 2
    targets = np.roll(tokens, -1, axis=1)
    same = np.roll(segments, -1, axis=1) == segments
    same[:, -1] = True
    padding = index >= generator.integers(length // 2, length + 1, (sequences, 1))
    weights = kept & same & ~padding
    weights[: sequences // 8] = False  # whole rows, and for many microbatches whole microbatches, without a target
    return {
        "tokens": tokens.astype(np.int32),
        "targets": np.where(weights, targets, 0).astype(np.int32),
        "segments": np.where(padding, 0, segments).astype(np.int32),
        "positions": positions.astype(np.int32),
        "weights": weights.astype(np.float32),
    }


def make_meshes(*degrees: Degrees | tuple[int, int, int]) -> list[Any]:
    """Meshes of consecutive devices; a tuple is (data, fsdp, tensor)."""
    meshes, rest = [], jax.devices()
    for one in degrees:
        one = one if isinstance(one, Degrees) else Degrees(*one)
        meshes.append(make_mesh(rest[: one.devices], one))
        rest = rest[one.devices :]
    return meshes


def make_layout(model, optimizer, stages: int, schedule: str, microbatches: int, shape) -> Any:
    """`stages` 0 is SPMD on one device; each stage has one device."""
    meshes = make_meshes(*[Degrees()] * max(1, stages))
    if stages == 0:
        return SpmdLayout(model, optimizer, meshes[0], microbatches, shape)
    return MpmdLayout(model, optimizer, meshes, schedule, microbatches, shape)


def run(layout, batches):
    """Losses and grad norms of a few steps from seed 0."""
    state, losses, norms = layout.init(0), [], []
    for some in batches:
        state, metrics = layout.step(state, some)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return np.array(losses), np.array(norms)
