"""The operators in plain jax.numpy: right on every platform, and what other providers are measured against.

Semantics are documented in `jax_titan.ops`. Half-precision inputs are computed on in float32 and float64
stays float64: `_wide` is the one place that decides.

Shape suffixes: B sequences, T query tokens, S key tokens (as many as T), N query heads, K key/value heads,
G query heads a key/value head, H head size, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu": partial(jax.nn.gelu, approximate=False)}


def _wide(dtype: jax.typing.DTypeLike) -> np.dtype:
    """The dtype to accumulate in: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


# Differentiating a plain einsum with a wide output would multiply its float32 cotangent by half-precision
# operands, at the speed of float32; and a weight cast before the product would leave a half-precision copy
# among the residuals and round the weight's gradient. Hence the rule by hand: every product has operands in
# x's dtype and a wide accumulator, residuals are the arguments themselves, and each gradient is rounded once,
# to its argument's dtype.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(spec: str, out_dtype: np.dtype, x: jax.Array, w: jax.Array) -> jax.Array:
    return _einsum(spec, x, w.astype(x.dtype), out_dtype)


def _product_forward(spec: str, out_dtype: np.dtype, x: jax.Array, w: jax.Array):
    return _product(spec, out_dtype, x, w), (x, w)


def _product_backward(spec: str, out_dtype: np.dtype, residuals: tuple[jax.Array, jax.Array], g: jax.Array):
    x, w = residuals
    x_spec, w_spec, out_spec = _terms(spec)
    g = g.astype(x.dtype)
    dx = _einsum(f"{out_spec},{w_spec}->{x_spec}", g, w.astype(x.dtype), x.dtype)
    dw = _einsum(f"{x_spec},{out_spec}->{w_spec}", x, g, w.dtype)
    return dx, dw


_product.defvjp(_product_forward, _product_backward)


def _einsum(spec: str, a: jax.Array, b: jax.Array, out_dtype: np.dtype) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=_wide(a.dtype)).astype(out_dtype)


def _terms(spec: str) -> tuple[str, str, str]:
    inputs, out = spec.split("->")
    x, w = inputs.split(",")
    return x, w, out


def linear(spec: str, x: jax.Array, w: jax.Array, out_dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    terms = _terms(spec)
    # A letter in one term only is a plain sum; no product of the other two terms gives its gradient.
    lonely = sorted({letter for term in terms for letter in term if sum(letter in t for t in terms) < 2})
    if lonely:
        raise ValueError(f"linear: {spec!r}: each letter must be in two of the three terms, unlike {lonely}")
    return _product(spec, np.dtype(out_dtype or x.dtype), x, w)


def embed(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    # Rows are cast after the look-up, so the table's gradient is summed in the table's dtype.
    return jnp.take(table_VD, tokens_BT, axis=0).astype(dtype or table_VD.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = _wide(x.dtype)
    x_wide = x.astype(wide)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x_wide), axis=-1, keepdims=True) + eps)
    return (x_wide * scale * weight.astype(wide)).astype(x.dtype)


def rope(x_BTNH: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    wide = _wide(x_BTNH.dtype)
    head_size = x_BTNH.shape[-1]
    # In NumPy and float64, as theta ** x in float32 is off by several units in the last place.
    frequencies = theta ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    angles_BT1F = positions_BT[:, :, None, None].astype(wide) * jnp.asarray(frequencies, wide)
    cos, sin = jnp.cos(angles_BT1F), jnp.sin(angles_BT1F)
    first, second = jnp.split(x_BTNH.astype(wide), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)


def glu(gate: jax.Array, up: jax.Array, activation: str = "silu") -> jax.Array:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"glu: activation {activation!r} is none of {sorted(_ACTIVATIONS)}")
    wide = _wide(gate.dtype)
    return (_ACTIVATIONS[activation](gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> jax.Array:
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    if N % K:
        raise ValueError(f"attention: {N} query heads are no multiple of {K} key/value heads")
    wide = _wide(q_BTNH.dtype)
    scale = H**-0.5 if scale is None else scale

    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores_BKGTS = scale * _product("BTKGH,BSKH->BKGTS", wide, q_BTKGH, k_BSKH)
    visible_B11TS = _visible(B, T, segments_BT, causal)[:, None, None]
    # The lowest finite number, not -inf: a row that sees nothing gets even weights instead of NaN, both here
    # and in the gradient, and the second `where` turns those into zeros.
    scores_BKGTS = jnp.where(visible_B11TS, scores_BKGTS, jnp.finfo(wide).min)
    weights_BKGTS = jnp.where(visible_B11TS, jax.nn.softmax(scores_BKGTS, axis=-1), 0.0)
    out_BTKGH = _product("BKGTS,BSKH->BTKGH", q_BTNH.dtype, weights_BKGTS.astype(v_BSKH.dtype), v_BSKH)
    return out_BTKGH.reshape(B, T, N, H)


def _visible(B: int, T: int, segments_BT: jax.Array | None, causal: bool) -> jax.Array:
    """visible_BTS: which keys S each query T may see."""
    visible_BTS = jnp.ones((B, T, T), bool)
    if causal:
        visible_BTS = jnp.tril(visible_BTS)
    if segments_BT is not None:
        same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
        visible_BTS = visible_BTS & same_BTS & (segments_BT != 0)[:, :, None]
    return visible_BTS


def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    wide = _wide(logits_BTV.dtype)
    logits_BTV = logits_BTV.astype(wide)
    weights_BT = weights_BT.astype(wide)
    chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[:, :, None], axis=-1)[:, :, 0]
    nll_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT
    # Not a bare product: a masked token may hold a target outside the vocabulary, and zero times NaN is NaN.
    return jnp.sum(jnp.where(weights_BT == 0, 0.0, weights_BT * nll_BT)), jnp.sum(weights_BT)
