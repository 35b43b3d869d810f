"""From a configuration to what it describes: the model, the optimizer, and the layout that holds them."""

from __future__ import annotations

from jax_titan.config import Config
from jax_titan.models.llama import LlamaConfig, llama
from jax_titan.models.unit import Model
from jax_titan.mpmd.topology import Device
from jax_titan.parallel.mesh import make_mesh
from jax_titan.trainer.layout import Layout
from jax_titan.trainer.mpmd import MpmdLayout
from jax_titan.trainer.optimizer import Optimizer, adamw
from jax_titan.trainer.remat import rematerialised
from jax_titan.trainer.spmd import SpmdLayout


def build_model(config: Config, vocab_size: int) -> Model:
    """The model of a configuration.

    Args:
        config: resolved.
        vocab_size: of the tokenizer, for a model that does not fix its own.
    """
    m = config.model
    return llama(
        LlamaConfig(
            layers=m.layers,
            dim=m.dim,
            heads=m.heads,
            kv_heads=m.kv_heads,
            head_dim=m.head_dim or m.dim // m.heads,
            ffn_dim=m.ffn_dim,
            vocab_size=m.vocab_size or vocab_size,
            rope_theta=m.rope_theta,
            rope_factor=m.rope_factor,
            rope_low_freq_factor=m.rope_low_freq_factor,
            rope_high_freq_factor=m.rope_high_freq_factor,
            rope_original_length=m.rope_original_length,
            norm_eps=m.norm_eps,
            init_std=m.init_std,
            tied=m.tied,
            dtype=m.dtype,
            loss_chunk=config.train.loss_chunk,
            loss_accumulator=config.train.loss_accumulator,
            sequence_length=config.train.sequence_length,
        )
    )


def build_optimizer(config: Config) -> Optimizer:
    """The update rule of a configuration; its learning rate spans `train.steps`."""
    o = config.optimizer
    return adamw(
        learning_rate=o.learning_rate,
        schedule=o.schedule,
        steps=config.train.steps,
        warmup_steps=o.warmup_steps,
        final_fraction=o.final_fraction,
        b1=o.b1,
        b2=o.b2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        clip_norm=o.clip_norm,
        state_dtype=o.state_dtype,
    )


def build_layout(config: Config, model: Model, optimizer: Optimizer, devices: list[Device]) -> Layout:
    """The layout of a configuration on the devices that it occupies; nothing is compiled yet."""
    t = config.train
    shape = (t.batch, t.sequence_length)
    model = rematerialised(model, t.remat)
    meshes, rest = [], list(devices)
    for degrees in config.degrees:
        meshes.append(make_mesh(rest[: degrees.devices], degrees))
        rest = rest[degrees.devices :]
    if config.parallel.layout == "mpmd":
        return MpmdLayout(model, optimizer, meshes, config.pipeline.schedule, t.microbatches, shape)
    return SpmdLayout(model, optimizer, meshes[0], t.microbatches, shape, config.parallel.scan_layers)
