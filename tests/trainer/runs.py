"""What the tests of layouts share: the demo's model, batches with hard masks, and a run of a few steps."""

from typing import Any

import jax
import numpy as np

from jax_titan.config import load
from jax_titan.models.llama import LlamaConfig, llama
from jax_titan.trainer.layout import MpmdLayout, SpmdLayout
from jax_titan.trainer.optimizer import adamw

BATCH = 24


def demo_model(tied: bool, dtype: Any, **changes):
    """The model of the preset llama3-debug, with a fixed vocabulary."""
    config = load("llama3-debug", [])
    m = config.model
    sizes = {
        "layers": m.layers,
        "dim": m.dim,
        "heads": m.heads,
        "kv_heads": m.kv_heads,
        "head_dim": m.head_dim or m.dim // m.heads,
        "ffn_dim": m.ffn_dim,
        "vocab_size": config.data.vocab_size,
        "sequence_length": config.train.sequence_length,
    }
    return llama(LlamaConfig(**(sizes | changes), tied=tied, dtype=dtype))


def demo_optimizer(steps: int = 20):
    o = load("llama3-debug", []).optimizer
    return adamw(
        learning_rate=o.learning_rate,
        schedule=o.schedule,
        steps=steps,
        warmup_steps=min(o.warmup_steps, steps),
        final_fraction=o.final_fraction,
        b1=o.b1,
        b2=o.b2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        clip_norm=o.clip_norm,
    )


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


def make_layout(model, optimizer, stages: int, schedule: str, microbatches: int, shape) -> Any:
    """`stages` 0 is SPMD on one device."""
    if stages == 0:
        return SpmdLayout(model, optimizer, jax.devices()[:1], microbatches, shape)
    return MpmdLayout(model, optimizer, jax.devices()[:stages], schedule, microbatches, shape)


def run(layout, batches):
    """Losses and grad norms of a few steps from seed 0."""
    state, losses, norms = layout.init(0), [], []
    for some in batches:
        state, metrics = layout.step(state, some)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return np.array(losses), np.array(norms)
