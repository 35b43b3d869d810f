"""Decoding with a cache against the whole sequence without one.

Shape suffixes: B sequences, T tokens of a sequence, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_titan.models.decode import cache_shapes, decode, empty_cache
from jax_titan.models.llama import LlamaConfig, llama
from jax_titan.models.unit import Model, Unit, logits
from jax_titan.parallel.sharding import spec_of

TINY = LlamaConfig(
    layers=2,
    dim=12,
    heads=6,
    kv_heads=2,
    head_dim=4,
    ffn_dim=20,
    vocab_size=37,
    rope_theta=100.0,
    dtype="float64",
    sequence_length=9,
)
CONFIGS = {
    "grouped queries": TINY,
    "tied": replace(TINY, tied=True),
    "a key head for each query head": replace(TINY, kv_heads=6),
    # 12 tokens of original context, so that all three parts of the rule are met.
    "stretched positions": replace(TINY, rope_factor=8.0, rope_original_length=12),
}
LENGTH = 16  # of the caches: longer than any sequence here


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def some_params(model: Model) -> dict[str, dict[str, jax.Array]]:
    rng = np.random.default_rng(0)

    def draw(leaf: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.normal(size=shape.shape)
        return jnp.asarray(1 + 0.1 * values if leaf.endswith("norm") else 0.3 * values, shape.dtype)

    return {unit: {leaf: draw(leaf, s) for leaf, s in leaves.items()} for unit, leaves in model.shapes.items()}


def some_rows(lengths: Sequence[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(TINY.vocab_size, size=length) for length in lengths]


def as_batch(
    rows: Sequence[np.ndarray], starts: Sequence[int] | None = None, width: int = 0
) -> dict[str, jax.Array]:
    """Pieces of rows that start at some positions, padded on the right with tokens and positions that mislead."""
    T = max(width, *map(len, rows))
    starts = starts or [0] * len(rows)

    def padded(values: list[np.ndarray], fill: int) -> jax.Array:
        return jnp.asarray([[*row, *[fill] * (T - len(row))] for row in values], jnp.int32)

    return {
        "tokens": padded(list(rows), 5),
        "positions": padded([start + np.arange(len(row)) for start, row in zip(starts, rows, strict=True)], 0),
        "segments": padded([np.full(len(row), 7) for row in rows], 0),
    }


# One model a configuration, so that its programs are compiled once.
model_of = cache(llama)


@cache
def compiled_logits(model: Model) -> Callable[..., jax.Array]:
    return jax.jit(partial(logits, model.units))


@cache
def compiled_decode(model: Model, last_only: bool = False) -> Callable[..., Any]:
    return jax.jit(partial(decode, model, last_only=last_only))


def alone(model: Model, params: Any, row: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one row, all at once and without a cache."""
    return np.asarray(compiled_logits(model)(params, as_batch([row], width=LENGTH))[0, : len(row)])


def in_pieces(model: Model, params: Any, rows: Sequence[np.ndarray], pieces: Sequence[int]) -> list[np.ndarray]:
    """Logits [T, V] of each row; all rows are decoded in one batch, in pieces of so many tokens."""
    kept = empty_cache(model, len(rows), LENGTH)
    step = compiled_decode(model)
    results: list[list[np.ndarray]] = [[] for _ in rows]
    start = 0
    for size in pieces:
        parts = [row[start : start + size] for row in rows]
        found, kept = step(params, as_batch(parts, [start] * len(rows)), kept)
        for result, part, values in zip(results, parts, np.asarray(found), strict=True):
            result.append(values[: len(part)])
        start += size
    return [np.concatenate(result) for result in results]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.usefixtures("x64")
def test_every_token_has_the_logits_of_the_whole_sequence(config: LlamaConfig) -> None:
    model = model_of(config)
    params, (row,) = some_params(model), some_rows([11])
    expected = alone(model, params, row)
    for pieces in ([4, *[1] * 7], [1] * 11, [4, 1, 4, 1, 1]):
        (found,) = in_pieces(model, params, [row], pieces)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


# As far as sums in another order, and in bfloat16 the roundings behind them, may go.
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 3e-6), ("bfloat16", 0.05)])
def test_lower_precision_is_near_the_whole_sequence(dtype: Any, bound: float) -> None:
    model = model_of(replace(TINY, dtype=dtype))
    params, (row,) = some_params(model), some_rows([11])
    (found,) = in_pieces(model, params, [row], [5, *[1] * 6])
    expected = alone(model, params, row)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound * np.abs(expected).max())


@pytest.mark.parametrize("name", ["grouped queries", "stretched positions"])
@pytest.mark.usefixtures("x64")
def test_rows_of_different_lengths_are_each_as_if_alone(name: str) -> None:
    model = model_of(CONFIGS[name])
    params, rows = some_params(model), some_rows([11, 6, 8])
    prompts = [7, 2, 5]
    step = compiled_decode(model)
    prompt = as_batch([row[:length] for row, length in zip(rows, prompts, strict=True)])
    found, kept = step(params, prompt, empty_cache(model, 3, LENGTH))
    results = [[*values[:length]] for values, length in zip(np.asarray(found), prompts, strict=True)]
    for after in range(4):
        places = [length + after for length in prompts]
        tokens = [row[place : place + 1] for row, place in zip(rows, places, strict=True)]
        found, kept = step(params, as_batch(tokens, places), kept)
        for result, values in zip(results, np.asarray(found), strict=True):
            result.extend(values)
    # All rows decoded four tokens in the same steps, from position 7, 2 and 5 on; the second ended at 6.
    for row, result, length in zip(rows, results, prompts, strict=True):
        expected = alone(model, params, row)[: length + 4]
        np.testing.assert_allclose(result[: len(expected)], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_a_row_that_has_ended_neither_changes_nor_disturbs() -> None:
    model = model_of(TINY)
    params, rows = some_params(model), some_rows([9, 4])
    found = in_pieces(model, params, rows, [3, *[1] * 6])  # the second row is padding from its fifth token on
    for row, result in zip(rows, found, strict=True):
        np.testing.assert_allclose(result, alone(model, params, row), rtol=1e-12, atol=1e-12)


def test_padding_enters_no_cache() -> None:
    model = model_of(replace(TINY, dtype="float32"))
    params, rows = some_params(model), some_rows([6, 2])
    _, kept = compiled_decode(model)(params, as_batch(rows), empty_cache(model, 2, LENGTH))
    for leaf in jax.tree.leaves(kept):
        written = np.any(np.asarray(leaf) != 0, axis=(2, 3))
        assert written.sum(axis=1).tolist() == [6, 2]
        assert written[0, :6].all()
        assert written[1, :2].all()


@pytest.mark.usefixtures("x64")
def test_a_used_cache_serves_another_document_as_it_is() -> None:
    model = model_of(TINY)
    params, (first, second) = some_params(model), some_rows([11, 6])
    _, kept = compiled_decode(model)(params, as_batch([first]), empty_cache(model, 1, LENGTH))
    found, kept = compiled_decode(model)(params, as_batch([second[:4]]), kept)
    more, _ = compiled_decode(model)(params, as_batch([second[4:]], [4]), kept)
    expected = alone(model, params, second)
    np.testing.assert_allclose(np.concatenate([found[0], more[0]]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_last_only_gives_each_rows_last_token() -> None:
    model = model_of(TINY)
    params, rows = some_params(model), some_rows([3, 7, 1])
    last, kept = compiled_decode(model, last_only=True)(params, as_batch(rows), empty_cache(model, 3, LENGTH))
    assert last.shape == (3, 1, TINY.vocab_size)
    for row, values in zip(rows, last, strict=True):
        np.testing.assert_allclose(values[0], alone(model, params, row)[-1], rtol=1e-12, atol=1e-12)
    _, expected = compiled_decode(model)(params, as_batch(rows), empty_cache(model, 3, LENGTH))
    jax.tree.map(np.testing.assert_array_equal, kept, expected)


def test_a_token_compiles_nothing_and_writes_the_cache_in_place() -> None:
    model = model_of(replace(TINY, dtype="float32"))
    params, rows = some_params(model), some_rows([9, 9])
    traces = []

    def count(params: Any, batch: Any, cache: Any) -> Any:
        traces.append(batch["tokens"].shape)
        return decode(model, params, batch, cache, last_only=True)

    step = jax.jit(count, donate_argnums=2)
    _, kept = step(params, as_batch([row[:4] for row in rows]), empty_cache(model, 2, LENGTH))
    for place in range(4, 9):
        before = kept
        _, kept = step(params, as_batch([row[place : place + 1] for row in rows], [place] * 2), before)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert traces == [(2, 4), (2, 1)]
    analysis = step.lower(params, as_batch([row[:1] for row in rows]), kept).compile().memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(kept))


@pytest.mark.usefixtures("x64")
def test_a_model_split_over_devices_decodes_the_same() -> None:
    model = model_of(TINY)
    params, rows = some_params(model), some_rows([9, 6])
    mesh = jax.make_mesh((1, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def placed(unit: str, leaf: str, array: jax.Array) -> jax.Array:
        spec = spec_of(model.logical_axes[unit][leaf], array.shape, dict(mesh.shape))
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    split = {unit: {leaf: placed(unit, leaf, a) for leaf, a in leaves.items()} for unit, leaves in params.items()}
    with jax.set_mesh(mesh):
        found = in_pieces(model, split, rows, [4, *[1] * 5])
        _, kept = compiled_decode(model)(split, as_batch(rows), empty_cache(model, 2, LENGTH))
    for row, result in zip(rows, found, strict=True):
        np.testing.assert_allclose(result, alone(model, params, row), rtol=1e-12, atol=1e-12)
    for leaf in jax.tree.leaves(kept):  # sequences over fsdp, key heads over tensor
        assert leaf.sharding.shard_shape(leaf.shape) == (1, LENGTH, 1, TINY.head_dim)


def test_a_cache_holds_keys_and_values_of_the_layers_alone() -> None:
    shapes = cache_shapes(llama(replace(TINY, dtype="bfloat16")), 3, LENGTH)
    assert list(shapes) == ["layers.0", "layers.1"]
    expected = jax.ShapeDtypeStruct((3, LENGTH, TINY.kv_heads, TINY.head_dim), jnp.bfloat16)
    assert shapes["layers.0"] == {"key": expected, "value": expected}


def test_a_model_without_logits_is_refused() -> None:
    unit = Unit("a", {}, lambda params, shared, carry, batch: carry, 1.0)
    with pytest.raises(ValueError, match="'a' has no logits"):
        decode(Model("none", (unit,)), {"a": {}}, {}, {})


def test_a_unit_with_half_of_the_contract_is_refused() -> None:
    unit = Unit("a", {}, lambda params, shared, carry, batch: carry, 1.0, cache=lambda batch_size, length: {})
    with pytest.raises(ValueError, match="'a' needs both cache and decode"):
        Model("half", (unit,))
