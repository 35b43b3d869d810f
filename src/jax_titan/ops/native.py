"""The operators in plain jax.numpy: right on every platform, and what other providers are measured against.

Semantics are documented in `jax_titan.ops`. Half-precision inputs are computed on in float32 and float64
stays float64: `wide_dtype` is the one place that decides.

Shape suffixes: B sequences, T query tokens, S key tokens (as many as T unless they come from a cache), N query
heads, K key/value heads, G query heads a key/value head, H head size, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_titan.ops.frequencies import RopeScaling, rope_frequencies

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu": partial(jax.nn.gelu, approximate=False)}


def wide_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """The dtype to accumulate in: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


# Differentiating a plain einsum with a wide output would multiply its float32 cotangent by half-precision
# operands, at the speed of float32; and a weight cast before the product would leave a half-precision copy
# among the residuals and round the weight's gradient. Hence the rule by hand: every product has operands in
# x's dtype and a wide accumulator, residuals are the arguments themselves, and each gradient is rounded once,
# to its argument's dtype.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(spec: str, out_dtype: np.dtype, x: jax.Array, w: jax.Array) -> jax.Array:
    return einsum_wide(spec, x, w.astype(x.dtype), out_dtype)


def _product_forward(spec: str, out_dtype: np.dtype, x: jax.Array, w: jax.Array):
    return _product(spec, out_dtype, x, w), (x, w)


def _product_backward(spec: str, out_dtype: np.dtype, residuals: tuple[jax.Array, jax.Array], g: jax.Array):
    x, w = residuals
    x_spec, w_spec, out_spec = terms(spec)
    g = g.astype(x.dtype)
    dx = einsum_wide(f"{out_spec},{w_spec}->{x_spec}", g, w.astype(x.dtype), x.dtype)
    dw = einsum_wide(f"{x_spec},{out_spec}->{w_spec}", x, g, w.dtype)
    return dx, dw


_product.defvjp(_product_forward, _product_backward)


def einsum_wide(spec: str, a: jax.Array, b: jax.Array, out_dtype: np.dtype) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=wide_dtype(a.dtype)).astype(out_dtype)


def terms(spec: str) -> tuple[str, str, str]:
    inputs, out = spec.split("->")
    x, w = inputs.split(",")
    return x, w, out


def linear(spec: str, x: jax.Array, w: jax.Array, out_dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    parts = terms(spec)
    # A letter in one term only is a plain sum; no product of the other two terms gives its gradient.
    lonely = sorted({letter for term in parts for letter in term if sum(letter in t for t in parts) < 2})
    if lonely:
        raise ValueError(f"linear: {spec!r}: each letter must be in two of the three terms, unlike {lonely}")
    return _product(spec, np.dtype(out_dtype or x.dtype), x, w)


def embed(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    # Rows are cast after the look-up, so the table's gradient is summed in the table's dtype.
    return jnp.take(table_VD, tokens_BT, axis=0).astype(dtype or table_VD.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = wide_dtype(x.dtype)
    x_wide = x.astype(wide)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x_wide), axis=-1, keepdims=True) + eps)
    return (x_wide * scale * weight.astype(wide)).astype(x.dtype)


def rope(
    x_BTNH: jax.Array, positions_BT: jax.Array, theta: float, scaling: RopeScaling | None = None
) -> jax.Array:
    wide = wide_dtype(x_BTNH.dtype)
    frequencies = rope_frequencies(x_BTNH.shape[-1], theta, scaling)
    angles_BT1F = positions_BT[:, :, None, None].astype(wide) * jnp.asarray(frequencies, wide)
    cos, sin = jnp.cos(angles_BT1F), jnp.sin(angles_BT1F)
    first, second = jnp.split(x_BTNH.astype(wide), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)


def glu(gate: jax.Array, up: jax.Array, activation: str = "silu") -> jax.Array:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"glu: activation {activation!r} is none of {sorted(_ACTIVATIONS)}")
    wide = wide_dtype(gate.dtype)
    return (_ACTIVATIONS[activation](gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    positions_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
    key_positions_BS: jax.Array | None = None,
) -> jax.Array:
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    if N % K:
        raise ValueError(f"attention: {N} query heads are no multiple of {K} key/value heads")
    if (positions_BT is None) != (key_positions_BS is None):
        raise ValueError("attention: positions and key_positions go together; give both or none")
    if segments_BT is None and key_segments_BS is not None:
        raise ValueError("attention: key_segments without segments; give both")
    own_places = (segments_BT is None or key_segments_BS is not None) and not (causal and positions_BT is None)
    if S != T and not own_places:
        raise ValueError(f"attention: {S} keys for {T} queries; give the keys segments and positions of their own")
    wide = wide_dtype(q_BTNH.dtype)
    scale = H**-0.5 if scale is None else scale

    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores_BKGTS = scale * _product("BTKGH,BSKH->BKGTS", wide, q_BTKGH, k_BSKH)
    visible_BTS = jnp.ones((B, T, S), bool)
    if causal:
        visible_BTS &= _not_later(T, positions_BT, key_positions_BS)
    if segments_BT is not None:
        visible_BTS &= _same_document(segments_BT, segments_BT if key_segments_BS is None else key_segments_BS)
    visible_B11TS = visible_BTS[:, None, None]
    # The lowest finite number, not -inf: a row that sees nothing gets even weights instead of NaN, both here
    # and in the gradient, and the second `where` turns those into zeros.
    scores_BKGTS = jnp.where(visible_B11TS, scores_BKGTS, jnp.finfo(wide).min)
    weights_BKGTS = jnp.where(visible_B11TS, jax.nn.softmax(scores_BKGTS, axis=-1), 0.0)
    out_BTKGH = _product("BKGTS,BSKH->BTKGH", q_BTNH.dtype, weights_BKGTS.astype(v_BSKH.dtype), v_BSKH)
    return out_BTKGH.reshape(B, T, N, H)


def _not_later(T: int, positions_BT: jax.Array | None, key_positions_BS: jax.Array | None) -> jax.Array:
    """[B or 1, T, S]: which keys are not later than each query; without positions they are one row in order."""
    if positions_BT is None or key_positions_BS is None:
        return jnp.tril(jnp.ones((1, T, T), bool))
    return key_positions_BS[:, None, :] <= positions_BT[:, :, None]


def _same_document(segments_BT: jax.Array, key_segments_BS: jax.Array) -> jax.Array:
    """[B, T, S]: which keys are of each query's document; padding, segment 0, is of none."""
    return (segments_BT[:, :, None] == key_segments_BS[:, None, :]) & (segments_BT != 0)[:, :, None]


def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    wide = wide_dtype(logits_BTV.dtype)
    logits_BTV = logits_BTV.astype(wide)
    weights_BT = weights_BT.astype(wide)
    chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[:, :, None], axis=-1)[:, :, 0]
    nll_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT
    # A masked token may hold a target outside the vocabulary, and zero times NaN is NaN, also in a gradient.
    nll_BT = jnp.where(weights_BT == 0, 0.0, nll_BT)
    return jnp.sum(weights_BT * nll_BT), jnp.sum(weights_BT)
