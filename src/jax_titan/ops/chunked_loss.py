"""The cross-entropy of a product without its logits: chunk after chunk of tokens, in both directions.

The full form holds [tokens, vocabulary] logits and their gradient, by far the largest arrays of a language model.
Here a chunk's logits live only while it is worked on: forward keeps one number a token, the log-normaliser, and
backward makes the logits of each chunk again. It costs one more product with the matrix, a third of the three.

Shape suffixes: B sequences, T tokens of a sequence, C chunks, t tokens of a sequence in a chunk, D model width,
V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jax_titan.ops.native import einsum_wide, terms, wide_dtype

type Constrain = Callable[[jax.Array], jax.Array]


def chunked(
    spec: str,
    x_BTD: jax.Array,
    w: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    chunk: int,
    accumulator: str,
    constrain: Constrain,
) -> tuple[jax.Array, jax.Array]:
    """See `ops.linear_cross_entropy`; `chunk` is at least 1."""
    B, T = targets_BT.shape
    # Along T, so that a batch split over devices stays split; evenly, so that little is padded.
    chunks = -(-T // max(1, chunk // B))
    length = -(-T // chunks)
    padding = length * chunks - T
    if padding:
        # Tokens of weight 0, which add nothing and get no gradient.
        x_BTD = jnp.pad(x_BTD, ((0, 0), (0, padding), (0, 0)))
        targets_BT, weights_BT = (jnp.pad(a, ((0, 0), (0, padding))) for a in (targets_BT, weights_BT))
    if x_BTD.dtype == jnp.float64:
        accumulator = "float64"
    return _loss(spec, length, jnp.dtype(accumulator), constrain, x_BTD, w, targets_BT, weights_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _loss(spec, length, accumulator, constrain, x_BTD, w, targets_BT, weights_BT):
    return _forward(spec, length, accumulator, constrain, x_BTD, w, targets_BT, weights_BT)[0]


def _forward(spec, length, accumulator, constrain, x_BTD, w, targets_BT, weights_BT):
    dtype = wide_dtype(x_BTD.dtype)
    matrix = w.astype(x_BTD.dtype)

    def body(loss_sum, chunk):
        x_BtD, targets_Bt, weights_Bt = chunk
        logits_BtV = constrain(einsum_wide(spec, x_BtD, matrix, dtype))
        normaliser_Bt = jax.nn.logsumexp(logits_BtV, axis=-1)
        nll_Bt = normaliser_Bt - _chosen(logits_BtV, targets_Bt)
        return loss_sum + _weighted(weights_Bt.astype(dtype), nll_Bt).sum(), normaliser_Bt

    chunks = tuple(_cut(a, length) for a in (x_BTD, targets_BT, weights_BT))
    loss_sum, normaliser_CBt = jax.lax.scan(body, jnp.zeros((), dtype), chunks)
    sums = loss_sum, jnp.sum(weights_BT.astype(dtype))
    return sums, (x_BTD, w, targets_BT, weights_BT, normaliser_CBt)


def _backward(spec, length, accumulator, constrain, residuals, cotangents):
    x_BTD, w, targets_BT, weights_BT, normaliser_CBt = residuals
    of_loss, of_weight = cotangents
    dtype = wide_dtype(x_BTD.dtype)
    x_spec, w_spec, out_spec = terms(spec)
    matrix = w.astype(x_BTD.dtype)

    def body(dw, chunk):
        x_BtD, targets_Bt, weights_Bt, normaliser_Bt = chunk
        logits_BtV = constrain(einsum_wide(spec, x_BtD, matrix, dtype))
        scale_Bt = _weighted(weights_Bt.astype(dtype), of_loss)
        is_target_BtV = _is_target(logits_BtV, targets_Bt)
        softmax_BtV = jnp.exp(logits_BtV - normaliser_Bt[..., None])
        d_logits_BtV = ((softmax_BtV - is_target_BtV) * scale_Bt[..., None]).astype(x_BtD.dtype)
        dx_BtD = einsum_wide(f"{out_spec},{w_spec}->{x_spec}", d_logits_BtV, matrix, x_BtD.dtype)
        more = einsum_wide(f"{x_spec},{out_spec}->{w_spec}", x_BtD, d_logits_BtV, dtype)
        nll_Bt = normaliser_Bt - _chosen(logits_BtV, targets_Bt)
        return (dw + more).astype(dw.dtype), (dx_BtD, jnp.where(weights_Bt == 0, 0.0, nll_Bt * of_loss))

    chunks = (*(_cut(a, length) for a in (x_BTD, targets_BT, weights_BT)), normaliser_CBt)
    dw, (dx_CBtD, d_weights_CBt) = jax.lax.scan(body, jnp.zeros(w.shape, accumulator), chunks)
    d_weights_BT = (_joined(d_weights_CBt) + of_weight).astype(weights_BT.dtype)
    return _joined(dx_CBtD), dw.astype(w.dtype), None, d_weights_BT


_loss.defvjp(_forward, _backward)


def _cut(a_BT: jax.Array, length: int) -> jax.Array:
    """[B, T, ...] as [C, B, t, ...]."""
    B, T, *rest = a_BT.shape
    return jnp.moveaxis(a_BT.reshape(B, T // length, length, *rest), 1, 0)


def _joined(a_CBt: jax.Array) -> jax.Array:
    """[C, B, t, ...] as [B, T, ...]."""
    C, B, t, *rest = a_CBt.shape
    return jnp.moveaxis(a_CBt, 0, 1).reshape(B, C * t, *rest)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]


def _chosen(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The logit of each target, by comparing: a vocabulary that is split over devices stays split."""
    return jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)


def _weighted(weights: jax.Array, nll: jax.Array) -> jax.Array:
    """Not a bare product: a masked token may hold a target outside the vocabulary, and zero times NaN is NaN."""
    return jnp.where(weights == 0, 0.0, weights * nll)
