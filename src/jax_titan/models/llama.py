"""Llama 3 as a chain of units: embed, layers.0 ... layers.{n-1}, head. The carry is one array, x_BTD.

Shape suffixes: B sequences, T tokens of a sequence, D model width (`dim`), N query heads, K key/value heads,
H head size, F feed-forward width (`ffn_dim`), V vocabulary.
Logical axes: vocab, embed, heads, kv_heads, head_dim, ffn.
Source: "The Llama 3 Herd of Models", 2024 (arXiv:2407.21783), section 3.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jax_titan import ops
from jax_titan.models.unit import Batch, Model, Parameter, Params, Unit, normal, ones


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and choices of a Llama.

    Args:
        layers: number of decoder layers.
        dim: model width D.
        heads: query heads N, a multiple of `kv_heads`.
        kv_heads: key/value heads K.
        head_dim: head size H, even.
        ffn_dim: feed-forward width F.
        vocab_size: vocabulary V.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of the RMS norms.
        init_std: standard deviation of the initial matrices; see `llama`.
        tied: the head reuses the embedding table.
        dtype: what is computed in. Parameters are float32, or float64 when this is (a test setting, needs
            x64).
        sequence_length: tokens at which attention is counted in `Unit.cost`; the model itself takes any
            length.

    Raises:
        ValueError: sizes that do not fit together, all of them in one message.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tied: bool = False
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    sequence_length: int = 8192

    def __post_init__(self) -> None:
        sizes = ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn_dim", "vocab_size", "sequence_length")
        problems = [f"{name}: {getattr(self, name)} is not positive" for name in sizes if getattr(self, name) < 1]
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            problems.append(f"heads: {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            problems.append(f"head_dim: {self.head_dim} is odd; rotary embedding turns pairs")
        if self.dtype not in ("bfloat16", "float32", "float64"):
            problems.append(f"dtype: {self.dtype!r} is none of bfloat16, float32, float64")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def param_dtype(self) -> str:
        """What parameters are stored in."""
        return "float64" if self.dtype == "float64" else "float32"


def llama(config: LlamaConfig) -> Model:
    """A Llama as a chain of units.

    Matrices start normal with standard deviation `init_std`; those that write to the residual stream (`wo`,
    `w_down`) with `init_std / sqrt(2 * layers)`, so that the sum over its 2 * layers contributions does not
    grow with depth (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3).
    Norms start at 1.

    Costs count two FLOPs a multiply-add, and attention over all `sequence_length` keys, not halved for
    causality (the convention of Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

    Args:
        config: sizes and choices.

    Returns:
        A model with the units "embed", "layers.0" ... and "head".
    """
    layers = [_layer(config, index) for index in range(config.layers)]
    return Model("llama", (_embed(config), *layers, _head(config)))


def _embed(config: LlamaConfig) -> Unit:
    parameter = partial(Parameter, dtype=config.param_dtype)
    V, D = config.vocab_size, config.dim
    return Unit(
        name="embed",
        parameters={"table": parameter((V, D), ("vocab", "embed"), normal(config.init_std))},
        apply=partial(_apply_embed, config),
        cost=float(D),  # a look-up multiplies nothing; its D copied numbers keep the cost from being zero
    )


def _layer(config: LlamaConfig, index: int) -> Unit:
    parameter = partial(Parameter, dtype=config.param_dtype)
    D, N, K, H, F = config.dim, config.heads, config.kv_heads, config.head_dim, config.ffn_dim
    matrix = normal(config.init_std)
    residual = normal(config.init_std / (2 * config.layers) ** 0.5)
    parameters = {
        "attention_norm": parameter((D,), ("embed",), ones),
        "wq": parameter((D, N, H), ("embed", "heads", "head_dim"), matrix),
        "wk": parameter((D, K, H), ("embed", "kv_heads", "head_dim"), matrix),
        "wv": parameter((D, K, H), ("embed", "kv_heads", "head_dim"), matrix),
        "wo": parameter((N, H, D), ("heads", "head_dim", "embed"), residual),
        "ffn_norm": parameter((D,), ("embed",), ones),
        "w_gate": parameter((D, F), ("embed", "ffn"), matrix),
        "w_up": parameter((D, F), ("embed", "ffn"), matrix),
        "w_down": parameter((F, D), ("ffn", "embed"), residual),
    }
    projections = 2 * D * (N + K + K + N) * H + 2 * D * 3 * F
    scores_and_values = 2 * 2 * config.sequence_length * N * H
    return Unit(
        name=f"layers.{index}",
        parameters=parameters,
        apply=partial(_apply_layer, config),
        cost=float(projections + scores_and_values),
    )


def _head(config: LlamaConfig) -> Unit:
    parameter = partial(Parameter, dtype=config.param_dtype)
    V, D = config.vocab_size, config.dim
    parameters = {"norm": parameter((D,), ("embed",), ones)}
    if not config.tied:
        parameters["unembed"] = parameter((D, V), ("embed", "vocab"), normal(config.init_std))
    return Unit(
        name="head",
        parameters=parameters,
        apply=partial(_apply_head, config),
        cost=2.0 * D * V,
        shares=("embed",) if config.tied else (),
        logits=partial(_logits, config),
    )


def _apply_embed(
    config: LlamaConfig, params: Params, shared: Mapping[str, Params], carry: None, batch: Batch
) -> jax.Array:
    return ops.embed(params["table"], batch["tokens"], dtype=config.dtype)


def _apply_layer(
    config: LlamaConfig, params: Params, shared: Mapping[str, Params], x_BTD: jax.Array, batch: Batch
) -> jax.Array:
    x_BTD = x_BTD + _attend(config, params, ops.rms_norm(x_BTD, params["attention_norm"], config.norm_eps), batch)
    return x_BTD + _feed_forward(params, ops.rms_norm(x_BTD, params["ffn_norm"], config.norm_eps))


def _attend(config: LlamaConfig, params: Params, x_BTD: jax.Array, batch: Batch) -> jax.Array:
    q_BTNH = ops.linear("BTD,DNH->BTNH", x_BTD, params["wq"])
    k_BTKH = ops.linear("BTD,DKH->BTKH", x_BTD, params["wk"])
    v_BTKH = ops.linear("BTD,DKH->BTKH", x_BTD, params["wv"])
    q_BTNH = ops.rope(q_BTNH, batch["positions"], config.rope_theta)
    k_BTKH = ops.rope(k_BTKH, batch["positions"], config.rope_theta)
    out_BTNH = ops.attention(q_BTNH, k_BTKH, v_BTKH, segments_BT=batch["segments"])
    return ops.linear("BTNH,NHD->BTD", out_BTNH, params["wo"])


def _feed_forward(params: Params, x_BTD: jax.Array) -> jax.Array:
    gate_BTF = ops.linear("BTD,DF->BTF", x_BTD, params["w_gate"])
    up_BTF = ops.linear("BTD,DF->BTF", x_BTD, params["w_up"])
    return ops.linear("BTF,FD->BTD", ops.glu(gate_BTF, up_BTF), params["w_down"])


def _logits(config: LlamaConfig, params: Params, shared: Mapping[str, Params], x_BTD: jax.Array) -> jax.Array:
    x_BTD = ops.rms_norm(x_BTD, params["norm"], config.norm_eps)
    # The loss sees logits that were never rounded to half precision.
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    if config.tied:
        return ops.linear("BTD,VD->BTV", x_BTD, shared["embed"]["table"], out_dtype=wide)
    return ops.linear("BTD,DV->BTV", x_BTD, params["unembed"], out_dtype=wide)


def _apply_head(
    config: LlamaConfig, params: Params, shared: Mapping[str, Params], x_BTD: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    logits_BTV = _logits(config, params, shared, x_BTD)
    loss_sum, weight_sum = ops.cross_entropy(logits_BTV, batch["targets"], batch["weights"])
    return loss_sum, weight_sum, {}
