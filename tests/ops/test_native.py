"""Native operators against float64 NumPy written from the equations, with gradients by central differences.

Shape suffixes: B sequences, T tokens, D model width, F feed-forward width, N query heads, K key/value heads,
H head size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_titan import ops

B, T, D, F, N, K, H, V = 2, 6, 5, 7, 4, 2, 4, 9
SEGMENTS_BT = np.array([[1, 1, 2, 2, 2, 0], [3, 1, 1, 1, 0, 0]], np.int32)
POSITIONS_BT = np.array([[0, 1, 0, 1, 2, 0], [9000, 0, 1, 2, 0, 0]], np.int32)
TOKENS_BT = np.array([[1, 1, 8, 0, 3, 1], [2, 4, 4, 7, 0, 5]], np.int32)
WEIGHTS_BT = np.array([[1, 0.5, 0, 2, 1, 0], [1, 1, 1, 0, 0, 0.25]], np.float32)


def linear_reference(x_BTD: np.ndarray, w_DNH: np.ndarray) -> np.ndarray:
    out_BTNH = np.zeros((*x_BTD.shape[:2], *w_DNH.shape[1:]))
    for d in range(x_BTD.shape[2]):
        out_BTNH += x_BTD[:, :, d, None, None] * w_DNH[d]
    return out_BTNH


def embed_reference(table_VD: np.ndarray) -> np.ndarray:
    return np.stack([[table_VD[token] for token in row] for row in TOKENS_BT])


def rms_norm_reference(x_BTD: np.ndarray, weight_D: np.ndarray) -> np.ndarray:
    return x_BTD / np.sqrt((x_BTD**2).mean(-1, keepdims=True) + 1e-2) * weight_D


def rope_reference(x_BTNH: np.ndarray) -> np.ndarray:
    """Each pair (i, i + H/2) as a complex number, turned by its angle."""
    half = x_BTNH.shape[-1] // 2
    out_BTNH = np.zeros_like(x_BTNH)
    for i in range(half):
        angle_BT1 = POSITIONS_BT[:, :, None] * 10_000.0 ** (-2 * i / (2 * half))
        turned = (x_BTNH[..., i] + 1j * x_BTNH[..., i + half]) * np.exp(1j * angle_BT1)
        out_BTNH[..., i], out_BTNH[..., i + half] = turned.real, turned.imag
    return out_BTNH


def glu_reference(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


def attention_reference(
    q_BTNH: np.ndarray,
    k_BTKH: np.ndarray,
    v_BTKH: np.ndarray,
    segments_BT: np.ndarray = SEGMENTS_BT,
    causal: bool = True,
) -> np.ndarray:
    """One query at a time over the list of keys it may see."""
    out_BTNH = np.zeros_like(q_BTNH)
    for b, t, n in np.ndindex(*q_BTNH.shape[:3]):
        kv = n // (q_BTNH.shape[2] // k_BTKH.shape[2])
        keys = [
            s
            for s in range(q_BTNH.shape[1])
            if segments_BT[b, s] == segments_BT[b, t] != 0 and (s <= t or not causal)
        ]
        if keys:
            scores = k_BTKH[b, keys, kv] @ q_BTNH[b, t, n] / np.sqrt(q_BTNH.shape[-1])
            weights = np.exp(scores - scores.max())
            out_BTNH[b, t, n] = weights / weights.sum() @ v_BTKH[b, keys, kv]
    return out_BTNH


def cross_entropy_reference(logits_BTV: np.ndarray) -> np.ndarray:
    loss_sum = 0.0
    for b, t in np.ndindex(*TOKENS_BT.shape):
        row = logits_BTV[b, t] - logits_BTV[b, t].max()
        loss_sum += WEIGHTS_BT[b, t] * (np.log(np.exp(row).sum()) - row[TOKENS_BT[b, t]])
    return np.array(loss_sum)


@dataclass(frozen=True)
class Case:
    """An operator as a function of its float arguments, its reference, and the arguments' shapes."""

    operator: Callable[..., jax.Array]
    reference: Callable[..., np.ndarray]
    shapes: tuple[tuple[int, ...], ...]


CASES = {
    "linear": Case(lambda x, w: ops.linear("BTD,DNH->BTNH", x, w), linear_reference, ((B, T, D), (D, N, H))),
    "embed": Case(lambda table: ops.embed(table, jnp.asarray(TOKENS_BT)), embed_reference, ((V, D),)),
    "rms_norm": Case(lambda x, w: ops.rms_norm(x, w, 1e-2), rms_norm_reference, ((B, T, D), (D,))),
    "rope": Case(lambda x: ops.rope(x, jnp.asarray(POSITIONS_BT), 10_000.0), rope_reference, ((B, T, N, H),)),
    "glu": Case(ops.glu, glu_reference, ((B, T, F), (B, T, F))),
    "attention": Case(
        lambda q, k, v: ops.attention(q, k, v, jnp.asarray(SEGMENTS_BT)),
        attention_reference,
        ((B, T, N, H), (B, T, K, H), (B, T, K, H)),
    ),
    "attention, both directions": Case(
        lambda q, k, v: ops.attention(q, k, v, jnp.asarray(SEGMENTS_BT), causal=False),
        lambda q, k, v: attention_reference(q, k, v, causal=False),
        ((B, T, N, H), (B, T, K, H), (B, T, K, H)),
    ),
    "cross_entropy": Case(
        lambda logits: ops.cross_entropy(logits, jnp.asarray(TOKENS_BT), jnp.asarray(WEIGHTS_BT, logits.dtype))[0],
        cross_entropy_reference,
        ((B, T, V),),
    ),
}


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def central_differences(function: Callable[..., np.floating], arguments: list[np.ndarray]) -> list[np.ndarray]:
    """Gradient of a scalar function with respect to every number of every argument."""
    step = 1e-5
    gradients = [np.zeros_like(argument) for argument in arguments]
    for argument, gradient in zip(arguments, gradients, strict=True):
        for index in np.ndindex(*argument.shape):
            value = argument[index]
            argument[index] = value + step
            above = function(*arguments)
            argument[index] = value - step
            gradient[index] = (above - function(*arguments)) / (2 * step)
            argument[index] = value
    return gradients


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.usefixtures("x64")
def test_float64_forward_and_gradient_match_the_reference(case: Case, rng: np.random.Generator) -> None:
    arguments = [rng.normal(size=shape) for shape in case.shapes]
    expected = case.reference(*arguments)
    cotangent = rng.normal(size=expected.shape)
    output, pullback = jax.vjp(case.operator, *map(jnp.asarray, arguments))
    np.testing.assert_allclose(output, expected, rtol=1e-12, atol=1e-12)

    gradients = pullback(jnp.asarray(cotangent))
    differences = central_differences(lambda *a: np.sum(cotangent * case.reference(*a)), arguments)
    for gradient, difference in zip(gradients, differences, strict=True):
        assert gradient.dtype == jnp.float64
        # Central differences of step 1e-5: truncation about 1e-10, cancellation about 1e-16 / 1e-5.
        np.testing.assert_allclose(gradient, difference, rtol=1e-7, atol=2e-9)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_low_precision_stays_within_its_roundings(
    case: Case, dtype: jax.typing.DTypeLike, rng: np.random.Generator
) -> None:
    low = [jnp.asarray(rng.normal(size=shape), dtype) for shape in case.shapes]
    wide = [np.asarray(array, np.float64) for array in low]
    output, pullback = jax.vjp(case.operator, *low)
    expected = case.reference(*wide)
    cotangent = jnp.asarray(rng.normal(size=expected.shape), output.dtype)
    gradients = pullback(cotangent)
    with jax.enable_x64(True):  # the float64 operator is proved against differences above
        wide_pullback = jax.vjp(case.operator, *map(jnp.asarray, wide))[1]
        expected_gradients = wide_pullback(jnp.asarray(np.asarray(cotangent, np.float64)))

    # In bfloat16 the deepest path, a gradient of attention, rounds four times (softmax weights, the scores'
    # cotangent, two results), each by half an eps of the largest value, as accumulation is in float32. In
    # float32 itself sums of up to 10 terms add a few eps.
    eps = float(jnp.finfo(dtype).eps) * (4 if dtype == jnp.float32 else 2)
    assert output.dtype == (jnp.float32 if output.ndim == 0 else dtype)
    results, references = [output, *gradients], [expected, *expected_gradients]
    for result, reference in zip(results, references, strict=True):
        bound = eps * np.abs(reference).max()
        np.testing.assert_allclose(np.asarray(result, np.float64), reference, rtol=0, atol=bound)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.usefixtures("x64")
def test_float64_never_passes_through_a_narrower_float(case: Case) -> None:
    def value_and_gradient(*arguments: jax.Array):
        output, pullback = jax.vjp(case.operator, *arguments)
        return output, pullback(output)

    arguments = [jax.ShapeDtypeStruct(shape, np.float64) for shape in case.shapes]
    text = str(jax.make_jaxpr(value_and_gradient)(*arguments))
    assert "f64[" in text
    assert not any(narrow in text for narrow in ("f32[", "bf16[", "f16["))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_long_sums_accumulate_in_float32(dtype: jax.typing.DTypeLike) -> None:
    # A bfloat16 accumulator stops at 256 and a float16 one at 2048: adding one no longer changes it.
    ones = jnp.ones((1, 1, 4096), dtype)
    assert ops.linear("BTD,DF->BTF", ones, jnp.ones((4096, 1), dtype)).item() == 4096
    # The square of 300 is beyond float16's largest number, 65504.
    np.testing.assert_array_equal(ops.rms_norm(300 * ones, jnp.ones(4096), 0.0), ones)
    loss_sum, weight_sum = ops.cross_entropy(
        jnp.zeros((1, 4096, 2), dtype), jnp.zeros((1, 4096), jnp.int32), jnp.ones((1, 4096))
    )
    np.testing.assert_allclose(loss_sum, 4096 * np.log(2), rtol=1e-6)
    assert weight_sum == 4096


def test_linear_keeps_no_cast_copy_of_a_wide_weight() -> None:
    x, w = jnp.ones((2, 3, 5), jnp.bfloat16), jnp.ones((5, 7), jnp.float32)
    _, pullback = jax.vjp(lambda x, w: ops.linear("BTD,DF->BTF", x, w), x, w)
    residuals = {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(pullback)}
    assert residuals == {((2, 3, 5), "bfloat16"), ((5, 7), "float32")}


def test_linear_does_not_round_the_gradient_of_a_wide_weight(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(B, T, D)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(D, F)), jnp.float32)
    g = jnp.asarray(rng.normal(size=(B, T, F)), jnp.bfloat16)
    gradient = jax.vjp(lambda w: ops.linear("BTD,DF->BTF", x, w), w)[1](g)[0]
    expected = np.einsum("BTD,BTF->DF", np.asarray(x, np.float64), np.asarray(g, np.float64))
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.usefixtures("x64")
def test_linear_handles_batch_letters_and_transposed_weights(rng: np.random.Generator) -> None:
    for spec, x_shape, w_shape in [
        ("EBD,EDF->EBF", (3, 4, 5), (3, 5, 2)),
        ("BTD,VD->BTV", (2, 3, 5), (7, 5)),
        ("BTNH,NHD->BTD", (2, 3, 4, 2), (4, 2, 5)),
    ]:
        x, w = jnp.asarray(rng.normal(size=x_shape)), jnp.asarray(rng.normal(size=w_shape))
        output, pullback = jax.vjp(lambda x, w, spec=spec: ops.linear(spec, x, w), x, w)
        plain, plain_pullback = jax.vjp(lambda x, w, spec=spec: jnp.einsum(spec, x, w), x, w)
        np.testing.assert_allclose(output, plain, rtol=1e-12)
        for gradient, expected in zip(pullback(output), plain_pullback(output), strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=1e-12)


def test_linear_rejects_a_letter_that_is_summed_alone() -> None:
    with pytest.raises(ValueError, match=r"in two of the three terms, unlike \['T'\]"):
        ops.linear("BTD,DF->BF", jnp.ones((2, 3, 5)), jnp.ones((5, 7)))


def test_rope_turns_the_first_half_against_the_second() -> None:
    # At position 1 the first frequency is 1 radian: (1, 0) becomes (cos 1, sin 1) at places 0 and H/2.
    x = jnp.zeros((1, 1, 1, 8)).at[..., 0].set(1.0)
    expected = np.zeros(8)
    expected[[0, 4]] = np.cos(1), np.sin(1)
    np.testing.assert_allclose(ops.rope(x, jnp.ones((1, 1), jnp.int32), 500_000.0)[0, 0, 0], expected, atol=1e-7)


@pytest.mark.usefixtures("x64")
def test_rope_scores_depend_on_distance_alone(rng: np.random.Generator) -> None:
    q, k = jnp.asarray(rng.normal(size=(2, 1, 1, 1, 64)))

    def score(q_position: int, k_position: int) -> jax.Array:
        turned = [
            ops.rope(x, jnp.full((1, 1), position), 500_000.0)
            for x, position in ((q, q_position), (k, k_position))
        ]
        return jnp.sum(turned[0] * turned[1])

    np.testing.assert_allclose(score(1007, 1000), score(7, 0), rtol=1e-11)
    assert abs(score(8, 0) - score(7, 0)) > 1e-3


@pytest.mark.usefixtures("x64")
def test_grouped_queries_equal_repeated_heads(rng: np.random.Generator) -> None:
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, heads, H))) for heads in (N, K, K))
    grouped = ops.attention(q, k, v, jnp.asarray(SEGMENTS_BT))
    repeated = ops.attention(
        q, jnp.repeat(k, N // K, axis=2), jnp.repeat(v, N // K, axis=2), jnp.asarray(SEGMENTS_BT)
    )
    np.testing.assert_allclose(grouped, repeated, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.usefixtures("x64")
def test_packed_documents_equal_separate_ones(causal: bool, rng: np.random.Generator) -> None:
    q, k, v = (jnp.asarray(rng.normal(size=(1, 7, heads, H))) for heads in (N, K, K))
    segments = jnp.array([[5, 5, 5, 2, 2, 2, 2]])
    packed = ops.attention(q, k, v, segments, causal=causal)
    first, second = (
        ops.attention(q[:, rows], k[:, rows], v[:, rows], causal=causal) for rows in (slice(3), slice(3, 7))
    )
    np.testing.assert_allclose(packed, jnp.concatenate([first, second], axis=1), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.usefixtures("x64")
def test_queries_find_the_keys_of_other_places_by_segment_and_position(
    causal: bool, rng: np.random.Generator
) -> None:
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, heads, H))) for heads in (N, K, K))
    segments, places = jnp.asarray(SEGMENTS_BT), jnp.tile(jnp.arange(T), (B, 1))
    whole = ops.attention(q, k, v, segments, causal=causal)
    # The last two queries of the first row and some two of the second, and the keys in another order.
    rows, asked = jnp.arange(B)[:, None], jnp.array([[4, 5], [1, 3]])
    mixed = jnp.asarray(rng.permutation(T))
    part = ops.attention(
        q[rows, asked],
        k[:, mixed],
        v[:, mixed],
        segments[rows, asked],
        causal=causal,
        positions_BT=places[rows, asked],
        key_segments_BS=segments[:, mixed],
        key_positions_BS=places[:, mixed],
    )
    np.testing.assert_allclose(part, whole[rows, asked], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_padding_gives_zeros_forward_and_backward(
    causal: bool, dtype: jax.typing.DTypeLike, rng: np.random.Generator
) -> None:
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, heads, H)), dtype) for heads in (N, K, K))
    segments = SEGMENTS_BT.copy()
    segments[1] = 0  # a whole row of padding
    output, pullback = jax.vjp(
        lambda q, k, v: ops.attention(q, k, v, jnp.asarray(segments), causal=causal), q, k, v
    )
    for array in (output, *pullback(jnp.ones_like(output))):
        assert jnp.all(jnp.isfinite(array))
        assert jnp.all(jnp.where(segments[:, :, None, None] == 0, array, 0) == 0)
        assert jnp.any(array != 0)


@pytest.mark.parametrize("magnitude", [1e4, -1e4])
def test_cross_entropy_is_stable_for_large_logits(magnitude: float, rng: np.random.Generator) -> None:
    logits = jnp.asarray(magnitude * rng.uniform(0.5, 1, size=(B, T, V)), jnp.float32)
    loss, gradient = jax.value_and_grad(
        lambda x: ops.cross_entropy(x, jnp.asarray(TOKENS_BT), jnp.asarray(WEIGHTS_BT))[0]
    )(logits)
    np.testing.assert_allclose(loss, cross_entropy_reference(np.asarray(logits, np.float64)), rtol=1e-6)
    assert jnp.all(jnp.isfinite(gradient))


def test_attention_is_stable_for_large_scores(rng: np.random.Generator) -> None:
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, heads, H)), jnp.float32) for heads in (N, K, K))
    output, pullback = jax.vjp(lambda q, k, v: ops.attention(q, k, v, jnp.asarray(SEGMENTS_BT)), 1e4 * q, k, v)
    expected = attention_reference(np.asarray(1e4 * q, np.float64), np.asarray(k), np.asarray(v))
    # Scores of 1e4 carry an absolute error of 1e4 eps, which is the softmax weights' relative error.
    np.testing.assert_allclose(output, expected, rtol=0, atol=4e4 * np.finfo(np.float32).eps)
    assert all(jnp.all(jnp.isfinite(gradient)) for gradient in pullback(jnp.ones_like(output)))


@pytest.mark.parametrize("ignored", [-1, -100, V, 2**31 - 1])
def test_cross_entropy_never_reads_a_target_of_weight_zero(ignored: int, rng: np.random.Generator) -> None:
    logits = jnp.asarray(rng.normal(size=(B, T, V)), jnp.float32)

    def loss(logits: jax.Array, targets: np.ndarray) -> jax.Array:
        return ops.cross_entropy(logits, jnp.asarray(targets), jnp.asarray(WEIGHTS_BT))[0]

    masked = np.where(WEIGHTS_BT == 0, ignored, TOKENS_BT).astype(np.int32)
    expected, actual = (jax.value_and_grad(loss)(logits, targets) for targets in (TOKENS_BT, masked))
    assert actual[0] == expected[0]
    np.testing.assert_array_equal(actual[1], expected[1])


def test_cross_entropy_returns_the_sum_of_weights() -> None:
    weight_sum = ops.cross_entropy(jnp.zeros((B, T, V)), jnp.asarray(TOKENS_BT), jnp.asarray(WEIGHTS_BT))[1]
    assert weight_sum == WEIGHTS_BT.sum()


@pytest.mark.usefixtures("x64")
def test_exact_gelu_gates_too() -> None:
    # gelu(x) = x * Phi(x) and Phi(1) = 0.8413447460685429.
    np.testing.assert_allclose(
        ops.glu(jnp.ones((1, 1)), jnp.full((1, 1), 2.0), activation="gelu"),
        2 * 0.8413447460685429,
        rtol=1e-14,
    )


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        ops.attention(jnp.ones((1, 2, 3, 4)), jnp.ones((1, 2, 2, 4)), jnp.ones((1, 2, 2, 4)))
    q, k = jnp.ones((1, 2, 1, 4)), jnp.ones((1, 3, 1, 4))
    of_q, of_k = jnp.ones((1, 2), jnp.int32), jnp.ones((1, 3), jnp.int32)
    with pytest.raises(ValueError, match="3 keys for 2 queries"):
        ops.attention(q, k, k)
    with pytest.raises(ValueError, match="3 keys for 2 queries"):
        ops.attention(q, k, k, of_q, positions_BT=of_q, key_positions_BS=of_k)
    with pytest.raises(ValueError, match="positions and key_positions go together"):
        ops.attention(q, k, k, of_q, key_segments_BS=of_k, positions_BT=of_q)
    with pytest.raises(ValueError, match="key_segments without segments"):
        ops.attention(q, k, k, key_segments_BS=of_k, positions_BT=of_q, key_positions_BS=of_k)
    with pytest.raises(ValueError, match="'relu' is none of"):
        ops.glu(jnp.ones(2), jnp.ones(2), activation="relu")
