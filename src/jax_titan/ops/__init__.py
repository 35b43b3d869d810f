"""Semantic operators: what models call, whoever computes it.

A model never names a kernel. Each operator here fixes shapes, meaning and precision; a provider does the
work, today always `native`. Inputs in half precision are accumulated in float32; float64 stays float64.

Shape suffixes: B sequences, T tokens of a sequence, S keys of a sequence, D model width, F feed-forward
width, N query heads, K key/value heads, H head size, V vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_titan.ops import native
from jax_titan.ops.chunked_loss import chunked
from jax_titan.ops.frequencies import RopeScaling

__all__ = [
    "RopeScaling",
    "attention",
    "cross_entropy",
    "embed",
    "glu",
    "linear",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
]


def linear(spec: str, x: jax.Array, w: jax.Array, out_dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Product of activations and a weight, written as an einsum: `linear("BTD,DF->BTF", x_BTD, w_DF)`.

    The weight may be stored wider than the activations (float32 beside bfloat16): it is cast at use, its
    gradient is not rounded on the way back, and no cast copy of it is kept for the backward pass.
    Reverse-mode differentiation only.

    Args:
        spec: two terms and a result; every letter must occur in at least two of the three.
        x: activations; their dtype is the one multiplied in, with accumulation in at least float32.
        w: weight of any float dtype.
        out_dtype: dtype of the result, that of `x` by default; a wider one skips the last rounding.

    Returns:
        The product, in `out_dtype`.

    Raises:
        ValueError: a letter of `spec` occurs in one term only.

    Source: mixed-precision training with float32 master weights, Micikevicius et al. 2018 (arXiv:1710.03740).
    """
    return native.linear(spec, x, w, out_dtype)


def embed(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Rows of an embedding table.

    Args:
        table_VD: one row a token of the vocabulary.
        tokens_BT: integers in [0, V).
        dtype: dtype of the result, that of the table by default.

    Returns:
        x_BTD. The table's gradient is summed in the table's dtype.
    """
    return native.embed(table_VD, tokens_BT, dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation of the last axis: `x / sqrt(mean(x^2) + eps) * weight`.

    Args:
        x: activations [..., D].
        weight: scale [D], of any float dtype.
        eps: added to the mean square.

    Returns:
        An array like `x`, computed in at least float32 and rounded once.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4.
    """
    return native.rms_norm(x, weight, eps)


def rope(
    x_BTNH: jax.Array, positions_BT: jax.Array, theta: float, scaling: RopeScaling | None = None
) -> jax.Array:
    """Rotary position embedding in the half-split order of Hugging Face's Llama.

    Components i and i + H/2 form a pair, rotated by `position * theta ** (-2i / H)`. (Meta's own checkpoints
    pair 2i with 2i + 1; their query and key projections need a permutation first.)

    Args:
        x_BTNH: queries or keys; H must be even.
        positions_BT: position of each token in its document.
        theta: base of the frequencies, 500000 in Llama 3.
        scaling: stretches the frequencies to a longer context; None leaves them.

    Returns:
        An array like `x_BTNH`; angles and rotation in at least float32.

    Source: Su et al. 2021 (arXiv:2104.09864), equation 34.
    """
    return native.rope(x_BTNH, positions_BT, theta, scaling)


def glu(gate: jax.Array, up: jax.Array, activation: str = "silu") -> jax.Array:
    """Gated linear unit without its projections: `activation(gate) * up`.

    Args:
        gate: [..., F], to be activated.
        up: [..., F], to be gated.
        activation: "silu" (SwiGLU) or "gelu" (exact, GEGLU).

    Returns:
        An array like `gate`, computed in at least float32 and rounded once.

    Raises:
        ValueError: unknown activation.

    Source: Shazeer 2020 (arXiv:2002.05202), equation 5.
    """
    return native.glu(gate, up, activation)


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    *,
    positions_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
    key_positions_BS: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention with grouped queries over packed documents.

    Query head n reads key/value head `n // (N // K)`. A token sees the tokens of its own segment, itself
    included, and with `causal` none after itself. Segment 0 is padding: it sees nothing, is seen by no
    document, and its output and gradients are zero.

    Args:
        q_BTNH: queries; N must be a multiple of K.
        k_BSKH: keys, of the queries' own tokens (then S is T) or of others, such as earlier ones in a cache.
        v_BSKH: values of the same tokens.
        segments_BT: document of each token, 0 for padding; None means one document a sequence.
        causal: hide later tokens.
        scale: factor on scores, `H ** -0.5` by default.
        positions_BT, key_positions_BS: what `causal` calls later; None for both means the order in the row.
        key_segments_BS: document of each key; None means that of the query in the same place.

    Returns:
        out_BTNH in the dtype of `q_BTNH`; scores and softmax in at least float32.

    Raises:
        ValueError: N is no multiple of K, or keys of other tokens lack segments or positions of their own.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1; grouped queries: Ainslie et al. 2023
    (arXiv:2305.13245).
    """
    return native.attention(
        q_BTNH, k_BSKH, v_BSKH, segments_BT, causal, scale, positions_BT, key_segments_BS, key_positions_BS
    )


def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weighted negative log-likelihood, summed over tokens and not yet divided.

    Args:
        logits_BTV: unnormalised log-probabilities of any magnitude.
        targets_BT: the right token of each place; must lie in [0, V) wherever the weight is not zero.
        weights_BT: weight of each place; a place of weight 0 adds nothing, whatever it holds.

    Returns:
        (loss_sum, weight_sum), scalars in at least float32.
    """
    return native.cross_entropy(logits_BTV, targets_BT, weights_BT)


def linear_cross_entropy(
    spec: str,
    x_BTD: jax.Array,
    w: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    chunk: int = 0,
    accumulator: str = "float32",
    constrain: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy` of `linear(spec, x, w)`; with a chunk the logits of all tokens never exist at once.

    Args:
        spec: "BTD,DV->BTV", or "BTD,VD->BTV" for a matrix that is the embedding table too.
        x_BTD: activations.
        w: the matrix, of any float dtype.
        targets_BT, weights_BT: as in `cross_entropy`.
        chunk: tokens, over all sequences, whose logits exist at once; rounded down to whole places of all
            sequences. 0 for all of them, which saves one product with the matrix.
        accumulator: with a chunk, the dtype in which the gradient of `w` is summed over chunks, "float32" or
            "bfloat16"; float64 inputs keep float64.
        constrain: called on logits [B, any, V], to say how they are split over devices.

    Returns:
        (loss_sum, weight_sum), scalars in at least float32.
    """
    constrain = constrain or (lambda logits: logits)
    if chunk and chunk < targets_BT.size:
        return chunked(spec, x_BTD, w, targets_BT, weights_BT, chunk, accumulator, constrain)
    # The loss sees logits that were never rounded to half precision.
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    return cross_entropy(constrain(linear(spec, x_BTD, w, out_dtype=wide)), targets_BT, weights_BT)
