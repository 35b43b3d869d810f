"""Llama (2, 3, 3.1, 3.2) as a chain of units: embed, layers.0 ... layers.{n-1}, head; the carry is x_BTD.

Shape suffixes: B sequences, T tokens of a sequence, S places of a sequence in a cache, D model width (`dim`), N
query heads, K key/value heads, H head size, F feed-forward width (`ffn_dim`), V vocabulary.
Logical axes: vocab, embed, heads, kv_heads, head_dim, ffn.
Source: "The Llama 3 Herd of Models", 2024 (arXiv:2407.21783), section 3.2; Touvron et al. 2023 (arXiv:2307.09288).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_titan import ops
from jax_titan.models.unit import Batch, Cache, Model, Parameter, Params, Unit, normal, ones
from jax_titan.parallel.sharding import constrain

KEPT_NAMES = ("query", "key", "value", "attention", "attention_out", "ffn_gate", "ffn_up", "ffn_out")
"""Values of a layer that a backward pass may keep, see `Unit.kept_names`: the results of its products."""

# How activations are split; `parallel.sharding` has the table.
_RESIDUAL = ("batch", "sequence", "activation_embed")
_QUERY = ("batch", "sequence", "heads", "head_dim")
_KEY = ("batch", "sequence", "kv_heads", "head_dim")
_FFN = ("batch", "sequence", "ffn")
_LOGITS = ("batch", "sequence", "vocab")


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
        rope_factor, rope_low_freq_factor, rope_high_freq_factor, rope_original_length: how they are stretched to a
            longer context, see `ops.RopeScaling`; a factor of 1 leaves them.
        norm_eps: epsilon of the RMS norms.
        init_std: standard deviation of the initial matrices; see `llama`.
        tied: the head reuses the embedding table.
        dtype: what is computed in. Parameters are float32, or float64 when this is (a test setting, needs
            x64).
        sequence_length: tokens at which attention is counted in `Unit.cost`; the model itself takes any
            length.
        loss_chunk: tokens of a microbatch whose logits exist at once in the loss; 0 for all.
        loss_accumulator: what the chunks' gradient of the output matrix is summed in, "float32" or "bfloat16".

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
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_length: int = 8192
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tied: bool = False
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    sequence_length: int = 8192
    loss_chunk: int = 0
    loss_accumulator: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        sizes = ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn_dim", "vocab_size", "sequence_length")
        problems = [f"{name}: {getattr(self, name)} is not positive" for name in sizes if getattr(self, name) < 1]
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            problems.append(f"heads: {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            problems.append(f"head_dim: {self.head_dim} is odd; rotary embedding turns pairs")
        if self.dtype not in ("bfloat16", "float32", "float64"):
            problems.append(f"dtype: {self.dtype!r} is none of bfloat16, float32, float64")
        if self.rope_factor != 1 and self.rope_high_freq_factor <= self.rope_low_freq_factor:
            problems.append(f"rope_high_freq_factor: {self.rope_high_freq_factor} is not above the low one")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def param_dtype(self) -> str:
        """What parameters are stored in."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def rope_scaling(self) -> ops.RopeScaling | None:
        """How rotary frequencies are stretched; None when they are not."""
        if self.rope_factor == 1:
            return None
        return ops.RopeScaling(
            self.rope_factor, self.rope_low_freq_factor, self.rope_high_freq_factor, self.rope_original_length
        )


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
    # One layer under many names: a layout sees that they are alike, and may run them all by one program.
    layer = _layer(config)
    layers = [replace(layer, name=f"layers.{index}") for index in range(config.layers)]
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


def _layer(config: LlamaConfig) -> Unit:
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
        name="layer",
        parameters=parameters,
        apply=partial(_apply_layer, config),
        cost=float(projections + scores_and_values),
        kept_names=KEPT_NAMES,
        cache=partial(_layer_cache, config),
        decode=partial(_decode_layer, config),
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
    return constrain(ops.embed(params["table"], batch["tokens"], dtype=config.dtype), _RESIDUAL)


def _apply_layer(
    config: LlamaConfig, params: Params, shared: Mapping[str, Params], x_BTD: jax.Array, batch: Batch
) -> jax.Array:
    q_BTNH, k_BTKH, v_BTKH = _heads(config, params, x_BTD, batch["positions"])
    out_BTNH = ops.attention(q_BTNH, k_BTKH, v_BTKH, segments_BT=batch["segments"])
    return _finish_layer(config, params, x_BTD, out_BTNH)


def _layer_cache(config: LlamaConfig, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Keys, already turned, and values. A token's place is its position, so no places need to be kept."""
    shape = (batch_size, length, config.kv_heads, config.head_dim)
    return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtype)) for name in ("key", "value")}


def _decode_layer(
    config: LlamaConfig,
    params: Params,
    shared: Mapping[str, Params],
    x_BTD: jax.Array,
    batch: Batch,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    q_BTNH, k_BTKH, v_BTKH = _heads(config, params, x_BTD, batch["positions"])
    k_BSKH = _entered(cache["key"], k_BTKH, batch)
    v_BSKH = _entered(cache["value"], v_BTKH, batch)
    B, S, *_ = k_BSKH.shape
    # One document a row: a token sees every place up to its own position, all of which have been written.
    out_BTNH = ops.attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        segments_BT=(batch["segments"] != 0).astype(jnp.int32),
        positions_BT=batch["positions"],
        key_segments_BS=jnp.ones((B, S), jnp.int32),
        key_positions_BS=jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S)),
    )
    return _finish_layer(config, params, x_BTD, out_BTNH), {"key": k_BSKH, "value": v_BSKH}


def _entered(cache_BSKH: jax.Array, new_BTKH: jax.Array, batch: Batch) -> jax.Array:
    """The cache with new tokens at their positions; padding, and what lies beyond its length, is left out."""
    B, S, *_ = cache_BSKH.shape
    places_BT = jnp.where(batch["segments"] == 0, S, batch["positions"])
    rows_B1 = jnp.arange(B)[:, None]
    return constrain(cache_BSKH.at[rows_B1, places_BT].set(new_BTKH, mode="drop"), _KEY)


def _heads(
    config: LlamaConfig, params: Params, x_BTD: jax.Array, positions_BT: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys, turned to their positions, and values."""
    x_BTD = ops.rms_norm(x_BTD, params["attention_norm"], config.norm_eps)
    q_BTNH = _kept("query", ops.linear("BTD,DNH->BTNH", x_BTD, params["wq"]), _QUERY)
    k_BTKH = _kept("key", ops.linear("BTD,DKH->BTKH", x_BTD, params["wk"]), _KEY)
    v_BTKH = _kept("value", ops.linear("BTD,DKH->BTKH", x_BTD, params["wv"]), _KEY)
    q_BTNH = ops.rope(q_BTNH, positions_BT, config.rope_theta, config.rope_scaling)
    k_BTKH = ops.rope(k_BTKH, positions_BT, config.rope_theta, config.rope_scaling)
    return q_BTNH, k_BTKH, v_BTKH


def _finish_layer(config: LlamaConfig, params: Params, x_BTD: jax.Array, out_BTNH: jax.Array) -> jax.Array:
    """What attention found, added to the residual stream, and then the feed-forward block."""
    out_BTNH = _kept("attention", out_BTNH, _QUERY)
    x_BTD = x_BTD + _kept("attention_out", ops.linear("BTNH,NHD->BTD", out_BTNH, params["wo"]), _RESIDUAL)
    x_BTD = constrain(x_BTD, _RESIDUAL)
    x_BTD = x_BTD + _feed_forward(params, ops.rms_norm(x_BTD, params["ffn_norm"], config.norm_eps))
    return constrain(x_BTD, _RESIDUAL)


def _feed_forward(params: Params, x_BTD: jax.Array) -> jax.Array:
    gate_BTF = _kept("ffn_gate", ops.linear("BTD,DF->BTF", x_BTD, params["w_gate"]), _FFN)
    up_BTF = _kept("ffn_up", ops.linear("BTD,DF->BTF", x_BTD, params["w_up"]), _FFN)
    return _kept("ffn_out", ops.linear("BTF,FD->BTD", ops.glu(gate_BTF, up_BTF), params["w_down"]), _RESIDUAL)


def _kept(name: str, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A value that is split by the table and that rematerialisation may keep under a name."""
    return checkpoint_name(constrain(x, axes), name)


def _output(config: LlamaConfig, params: Params, shared: Mapping[str, Params]) -> tuple[str, jax.Array]:
    """The product that makes logits, and its matrix."""
    if config.tied:
        return "BTD,VD->BTV", shared["embed"]["table"]
    return "BTD,DV->BTV", params["unembed"]


def _logits(config: LlamaConfig, params: Params, shared: Mapping[str, Params], x_BTD: jax.Array) -> jax.Array:
    x_BTD = ops.rms_norm(x_BTD, params["norm"], config.norm_eps)
    spec, matrix = _output(config, params, shared)
    # The loss sees logits that were never rounded to half precision.
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    return constrain(ops.linear(spec, x_BTD, matrix, out_dtype=wide), _LOGITS)


def _apply_head(
    config: LlamaConfig, params: Params, shared: Mapping[str, Params], x_BTD: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    x_BTD = ops.rms_norm(x_BTD, params["norm"], config.norm_eps)
    spec, matrix = _output(config, params, shared)
    loss_sum, weight_sum = ops.linear_cross_entropy(
        spec,
        x_BTD,
        matrix,
        batch["targets"],
        batch["weights"],
        chunk=config.loss_chunk,
        accumulator=config.loss_accumulator,
        constrain=lambda logits_BTV: constrain(logits_BTV, _LOGITS),
    )
    return loss_sum, weight_sum, {}
