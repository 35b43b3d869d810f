"""The loss in chunks against the form that holds all logits.

Shape suffixes: B sequences, T tokens, D model width, V vocabulary.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_titan import ops

B, T, D, V = 3, 37, 6, 101
UNTIED, TIED = "BTD,DV->BTV", "BTD,VD->BTV"


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def some_arguments(spec: str, dtype: Any, sizes: tuple[int, int, int, int] = (B, T, D, V)) -> tuple[Any, ...]:
    """x, w, targets and weights, a quarter of which are 0."""
    sequences, tokens, width, vocabulary = sizes
    rng = np.random.default_rng(0)
    shape = (sequences, tokens)
    w = rng.normal(size=(width, vocabulary))
    weights = rng.choice([0.0, 0.5, 1.0, 2.0], size=shape)
    return (
        jnp.asarray(rng.normal(size=(*shape, width)), dtype),
        jnp.asarray(w if spec == UNTIED else w.T, dtype),
        jnp.asarray(rng.integers(vocabulary, size=shape), jnp.int32),
        jnp.asarray(weights, jnp.promote_types(dtype, jnp.float32)),
    )


def value_and_gradients(spec: str, **choices: Any) -> Callable[..., Any]:
    """((sum of both results, results), gradients of x, w and weights), the results counted differently."""

    def scalar(x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array):
        loss_sum, weight_sum = ops.linear_cross_entropy(spec, x, w, targets, weights, **choices)
        return 0.7 * loss_sum + 3 * weight_sum, (loss_sum, weight_sum)

    return jax.value_and_grad(scalar, argnums=(0, 1, 3), has_aux=True)


@pytest.mark.parametrize("chunk", [1, 5, 16, 1000])
@pytest.mark.parametrize("spec", [UNTIED, TIED])
@pytest.mark.usefixtures("x64")
def test_chunks_give_the_loss_and_all_gradients_of_the_full_form(spec: str, chunk: int) -> None:
    arguments = some_arguments(spec, jnp.float64)
    expected = jax.jit(value_and_gradients(spec, chunk=0))(*arguments)
    actual = jax.jit(value_and_gradients(spec, chunk=chunk))(*arguments)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.float64
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


# In bfloat16 a gradient of a logit is rounded once (half an eps, 2^-8) and then the result once; float32 sums up
# to 111 terms.
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 2e-6), (jnp.bfloat16, 2**-7)])
@pytest.mark.parametrize("spec", [UNTIED, TIED])
def test_low_precision_stays_within_its_roundings(spec: str, dtype: Any, bound: float) -> None:
    arguments = some_arguments(spec, dtype)
    (_, sums), gradients = jax.jit(value_and_gradients(spec, chunk=16))(*arguments)
    with jax.enable_x64(True):
        wide = [a if a.dtype == jnp.int32 else jnp.asarray(np.asarray(a), jnp.float64) for a in arguments]
        (_, expected_sums), expected = jax.jit(value_and_gradients(spec, chunk=0))(*wide)
    assert [a.dtype for a in gradients] == [dtype, dtype, jnp.float32]
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-5)
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=bound * np.abs(b).max())


def test_the_accumulator_is_what_the_matrix_gradient_is_summed_in() -> None:
    x, w, targets, weights = some_arguments(UNTIED, jnp.float32)
    x = x.astype(jnp.bfloat16)
    wide, narrow = (
        value_and_gradients(UNTIED, chunk=16, accumulator=accumulator)(x, w, targets, weights)[1][1]
        for accumulator in ("float32", "bfloat16")
    )
    assert wide.dtype == narrow.dtype == jnp.float32
    in_bfloat16 = [jnp.mean(a == a.astype(jnp.bfloat16).astype(jnp.float32)) for a in (wide, narrow)]
    assert in_bfloat16[0] < 0.1
    assert in_bfloat16[1] == 1
    # 8 chunks, each rounding the sum by half an eps at most.
    np.testing.assert_allclose(narrow, wide, rtol=0, atol=8 * 2**-8 * float(jnp.abs(wide).max()))


@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("ignored", [-1, -100, V, 2**31 - 1])
def test_a_target_of_weight_zero_is_never_read(ignored: int, chunk: int) -> None:
    x, w, targets, weights = some_arguments(TIED, jnp.float32)
    masked = jnp.where(weights == 0, ignored, targets)
    run = jax.jit(value_and_gradients(TIED, chunk=chunk))
    expected, actual = run(x, w, targets, weights), run(x, w, masked, weights)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(actual))
    assert jnp.all(actual[1][0][weights == 0] == 0)


def test_forward_keeps_one_number_a_token_beside_its_arguments() -> None:
    x, w, targets, weights = some_arguments(UNTIED, jnp.float32)
    _, pullback = jax.vjp(
        lambda x, w: ops.linear_cross_entropy(UNTIED, x, w, targets, weights, chunk=B * 5)[0], x, w
    )
    kept = sum(leaf.size for leaf in jax.tree.leaves(pullback))
    padded = B * 40  # 8 chunks of 5 places
    assert kept <= padded * D + D * V + 3 * padded + 1  # x, w, targets, weights, log-normaliser, and the shape


@pytest.mark.parametrize("sequences", [1, 8])
def test_temporary_memory_is_a_third_of_the_full_form(sequences: int) -> None:
    shape = (sequences, 1024 // sequences)
    x, w = (jax.ShapeDtypeStruct(size, jnp.float32) for size in ((*shape, 512), (512, 32768)))
    targets, weights = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))

    def temporary_bytes(chunk: int) -> int:
        def loss(x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
            return ops.linear_cross_entropy(UNTIED, x, w, targets, weights, chunk=chunk)[0]

        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(x, w, targets, weights).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary_bytes(chunk=128) <= 0.35 * temporary_bytes(chunk=0)


@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("spec", [UNTIED, TIED])
@pytest.mark.usefixtures("x64")
def test_a_vocabulary_and_a_batch_split_over_devices_change_nothing(spec: str, chunk: int) -> None:
    x, w, targets, weights = some_arguments(spec, jnp.float64, (4, 10, 6, 36))
    expected = value_and_gradients(spec, chunk=0)(x, w, targets, weights)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def split(*axes: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    shardings = (split("data"), split(None, "tensor") if spec == UNTIED else split("tensor"))
    hint = partial(jax.lax.with_sharding_constraint, shardings=split("data", None, "tensor"))
    run = jax.jit(value_and_gradients(spec, chunk=chunk, constrain=hint))
    placed = jax.device_put((x, w, targets, weights), (*shardings, split("data"), split("data")))
    for a, b in zip(jax.tree.leaves(run(*placed)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    # No device fetches the others' parts of the vocabulary, for logits of its two sequences.
    program = run.lower(*placed).compile().as_text()
    assert program is not None
    assert not re.search(r"\[2,\d+,36\]\S* all-gather\(", program)
