"""Llama against an independent float64 NumPy forward pass, finite differences, closed forms and Hugging Face.

Shape suffixes: B sequences, T tokens, D model width, N query heads, K key/value heads, H head size, F
feed-forward width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_titan.models.llama import LlamaConfig, llama
from jax_titan.models.unit import Batch, Params, forward, logits

# Every size differs from every other, so that no two axes can be confused.
TINY = LlamaConfig(
    layers=2,
    dim=12,
    heads=6,
    kv_heads=2,
    head_dim=4,
    ffn_dim=20,
    vocab_size=37,
    rope_theta=10_000.0,
    dtype="float64",
    sequence_length=9,
)
# For tests of first values: wide enough for statistics, and one config so that its samplers compile once.
FRESH = replace(TINY, dim=64, heads=8, head_dim=16, ffn_dim=160, vocab_size=256, dtype="float32")
LLAMA3_8B = LlamaConfig(layers=32, dim=4096, heads=32, kv_heads=8, head_dim=128, ffn_dim=14336, vocab_size=128_256)

type Arrays = Mapping[str, Mapping[str, np.ndarray]]


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def some_batch(config: LlamaConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Two rows of nine tokens: documents of 4 and 3 tokens and padding; documents of 2 and 7 tokens."""
    rng = np.random.default_rng(seed)
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2, 2]], np.int32)
    return {
        "tokens": jnp.asarray(rng.integers(config.vocab_size, size=(2, 9)), jnp.int32),
        "targets": jnp.asarray(rng.integers(config.vocab_size, size=(2, 9)), jnp.int32),
        "segments": jnp.asarray(segments),
        "positions": jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 0, 0], [0, 1, 0, 1, 2, 3, 4, 5, 6]], jnp.int32),
        "weights": jnp.asarray((segments != 0) * rng.choice([0.0, 0.5, 1.0], size=(2, 9)), jnp.float32),
    }


def some_params(config: LlamaConfig, seed: int = 0) -> dict[str, dict[str, jax.Array]]:
    """Parameters as if trained for a while: no scale is exactly one, and residual projections count."""
    rng = np.random.default_rng(seed)

    def draw(leaf: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.normal(size=shape.shape)
        return jnp.asarray(1 + 0.1 * values if leaf.endswith("norm") else 0.3 * values, shape.dtype)

    return {
        unit: {leaf: draw(leaf, shape) for leaf, shape in leaves.items()}
        for unit, leaves in llama(config).shapes.items()
    }


@cache
def compiled_logits(config: LlamaConfig) -> Callable[[Mapping[str, Params], Batch], jax.Array]:
    return jax.jit(partial(logits, llama(config).units))


@cache
def compiled_gradient(config: LlamaConfig) -> Callable[..., tuple[tuple[jax.Array, jax.Array], Any]]:
    """(params, batch) -> ((loss_sum, weight_sum), gradient of loss_sum)."""

    def loss_and_weight(params: Mapping[str, Params], batch: Batch) -> tuple[jax.Array, jax.Array]:
        loss, weight, _ = forward(llama(config).units, params, batch)
        return loss, weight

    return jax.jit(jax.value_and_grad(loss_and_weight, has_aux=True))


def loss_sum(config: LlamaConfig, params: Mapping[str, Params], batch: Batch) -> jax.Array:
    return forward(llama(config).units, params, batch)[0]


def reference_logits(config: LlamaConfig, params: Arrays, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Llama 3 by its equations: one sequence and one head at a time, masked scores as minus infinity."""
    table_VD = params["embed"]["table"]
    unembed_DV = table_VD.T if config.tied else params["head"]["unembed"]
    rows = []
    for tokens, segments, positions in zip(batch["tokens"], batch["segments"], batch["positions"], strict=True):
        x_TD = table_VD[tokens]
        for index in range(config.layers):
            layer = params[f"layers.{index}"]
            x_TD = x_TD + reference_attention(
                config, layer, reference_norm(x_TD, layer["attention_norm"], config), segments, positions
            )
            h_TD = reference_norm(x_TD, layer["ffn_norm"], config)
            gate_TF = h_TD @ layer["w_gate"]
            x_TD = x_TD + (gate_TF / (1 + np.exp(-gate_TF)) * (h_TD @ layer["w_up"])) @ layer["w_down"]
        rows.append(reference_norm(x_TD, params["head"]["norm"], config) @ unembed_DV)
    return np.stack(rows)


def reference_norm(x_TD: np.ndarray, scale_D: np.ndarray, config: LlamaConfig) -> np.ndarray:
    return scale_D * x_TD / np.sqrt(np.mean(x_TD * x_TD, axis=-1, keepdims=True) + config.norm_eps)


def reference_attention(
    config: LlamaConfig,
    layer: Mapping[str, np.ndarray],
    h_TD: np.ndarray,
    segments: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    out_TD = np.zeros_like(h_TD)
    T = len(h_TD)
    visible_TT = (segments[:, None] == segments) & (np.arange(T)[:, None] >= np.arange(T)) & (segments != 0)
    for head in range(config.heads):
        kv_head = head // (config.heads // config.kv_heads)
        q_TH = reference_rope(h_TD @ layer["wq"][:, head], positions, config)
        k_TH = reference_rope(h_TD @ layer["wk"][:, kv_head], positions, config)
        v_TH = h_TD @ layer["wv"][:, kv_head]
        scores_TT = np.exp(np.where(visible_TT, q_TH @ k_TH.T / np.sqrt(config.head_dim), -np.inf))
        weights_TT = scores_TT / np.where(segments != 0, scores_TT.sum(-1), 1.0)[:, None]
        out_TD += weights_TT @ v_TH @ layer["wo"][head]
    return out_TD


def reference_rope(x_TH: np.ndarray, positions: np.ndarray, config: LlamaConfig) -> np.ndarray:
    half = config.head_dim // 2
    turn = np.exp(1j * np.outer(positions, config.rope_theta ** (-np.arange(half) / half)))
    turned = (x_TH[:, :half] + 1j * x_TH[:, half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def to_numpy(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64 if leaf.dtype.kind == "f" else None), tree)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.usefixtures("x64")
def test_logits_and_loss_match_the_reference(tied: bool) -> None:
    config = replace(TINY, tied=tied)
    params, batch = some_params(config), some_batch(config)
    actual = compiled_logits(config)(params, batch)
    expected = reference_logits(config, to_numpy(params), to_numpy(batch))
    assert actual.dtype == jnp.float64
    np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-11)

    nll = np.log(np.exp(expected).sum(-1)) - np.take_along_axis(
        expected, np.asarray(batch["targets"])[..., None], axis=-1
    ).squeeze(-1)
    loss, weight, metrics = forward(llama(config).units, params, batch)
    np.testing.assert_allclose(loss, np.sum(nll * np.asarray(batch["weights"])), rtol=1e-12)
    assert weight == np.sum(batch["weights"])
    assert metrics == {}


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 3e-6), ("bfloat16", 0.05)])
def test_lower_precision_is_near_float64(dtype: str, bound: float) -> None:
    # About ten roundings lie one behind the other in each of two layers, half an eps each; adding up like a
    # random walk they reach sqrt(20) / 2 eps: 2e-2 in bfloat16 (eps 2^-7), 3e-7 in float32. The bounds leave
    # room for cancellation, and in float32 for sums and exponentials, which are not exact there either.
    config = replace(TINY, dtype=dtype)
    params, batch = some_params(config), some_batch(config)
    actual = compiled_logits(config)(params, batch)
    expected = reference_logits(config, to_numpy(params), to_numpy(batch))
    assert actual.dtype == jnp.float32
    assert forward(llama(config).units[:-1], params, batch).dtype == dtype
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound * np.abs(expected).max())


def test_bfloat16_gradients_arrive_in_the_parameters_dtype() -> None:
    config = replace(TINY, layers=1, dtype="bfloat16", tied=True)
    params, batch = some_params(config), some_batch(config)
    _, gradient = compiled_gradient(config)(params, batch)
    _, exact = compiled_gradient(replace(config, dtype="float32"))(params, batch)
    for leaf, expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True):
        assert leaf.dtype == jnp.float32
        assert jnp.linalg.norm(leaf - expected) < 0.1 * jnp.linalg.norm(expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.usefixtures("x64")
def test_gradient_matches_finite_differences_for_every_leaf(tied: bool) -> None:
    config = replace(TINY, tied=tied)
    params, batch = some_params(config), some_batch(config)
    loss = jax.jit(lambda p: loss_sum(config, p, batch))
    _, gradient = compiled_gradient(config)(params, batch)
    rng = np.random.default_rng(1)
    for unit, leaves in params.items():
        for leaf in leaves:
            direction = jnp.asarray(rng.normal(size=leaves[leaf].shape))
            direction /= jnp.linalg.norm(direction)

            def along(step: float, unit=unit, leaf=leaf, direction=direction) -> float:
                moved = {**params[unit], leaf: params[unit][leaf] + step * direction}
                return float(loss({**params, unit: moved}))

            # Fourth order: truncation about h^4 = 1e-12, cancellation about 1e-15 * loss / h = 1e-11.
            h = 1e-3
            difference = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
            derivative = float(jnp.vdot(gradient[unit][leaf], direction))
            assert derivative == pytest.approx(difference, rel=1e-6), f"{unit}.{leaf}"


@pytest.mark.usefixtures("x64")
def test_cutting_the_chain_anywhere_gives_the_same_loss_and_gradient() -> None:
    config = replace(TINY, tied=True)
    units = llama(config).units
    params, batch = some_params(config), some_batch(config)
    whole_loss, whole_gradient = jax.value_and_grad(lambda p: loss_sum(config, p, batch))(params)
    for cut in range(1, len(units)):
        carry, pull_first = jax.vjp(lambda p, cut=cut: forward(units[:cut], p, batch), params)
        loss, pull_second = jax.vjp(lambda p, c, cut=cut: forward(units[cut:], p, batch, c)[0], params, carry)
        second, carry_gradient = pull_second(jnp.ones(()))
        (first,) = pull_first(carry_gradient)
        assert loss == whole_loss
        jax.tree.map(
            lambda a, b, c: np.testing.assert_allclose(a + b, c, rtol=1e-12, atol=1e-13),
            first,
            second,
            whole_gradient,
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changing_one_document_moves_no_logit_of_another(dtype: str) -> None:
    config = replace(TINY, dtype=dtype)
    params, batch = some_params(config), some_batch(config)
    run = partial(compiled_logits(config), params)
    before = run(batch)
    for document in (0, 1, 2):
        inside = batch["segments"] == document
        tokens = jnp.where(inside, (batch["tokens"] + 5) % config.vocab_size, batch["tokens"])
        changed = jnp.any(run({**batch, "tokens": tokens}) != before, axis=-1)
        assert jnp.array_equal(changed, inside)


@pytest.mark.usefixtures("x64")
def test_a_packed_row_equals_separate_rows() -> None:
    params, batch = some_params(TINY), some_batch(TINY)
    packed = compiled_logits(TINY)(params, batch)
    for row, rows in ((0, slice(0, 4)), (0, slice(4, 7)), (1, slice(0, 2)), (1, slice(2, 9))):
        alone = {name: array[row : row + 1, rows] for name, array in batch.items()}
        alone["segments"] = jnp.ones_like(alone["segments"])
        np.testing.assert_allclose(
            compiled_logits(TINY)(params, alone)[0], packed[row, rows], rtol=1e-12, atol=1e-12
        )


def test_no_later_token_moves_an_earlier_logit() -> None:
    config = replace(TINY, dtype="float32")
    params, batch = some_params(config), some_batch(config)
    batch["segments"] = jnp.ones_like(batch["segments"])
    run = partial(compiled_logits(config), params)
    tokens = batch["tokens"].at[:, 4].add(1) % config.vocab_size
    changed = jnp.any(run({**batch, "tokens": tokens}) != run(batch), axis=(0, 2))
    assert changed.tolist() == [False] * 4 + [True] * 5


@pytest.mark.usefixtures("x64")
def test_weights_mask_and_scale_the_loss_and_its_gradient() -> None:
    params, batch = some_params(TINY), some_batch(TINY)

    def run(weights: jax.Array):
        (loss, weight), gradient = compiled_gradient(TINY)(params, {**batch, "weights": weights})
        return loss, weight, gradient["layers.0"]["wq"]

    ones = jnp.ones((2, 9), jnp.float32)
    left = jnp.where(jnp.arange(9) < 4, ones, 0)
    whole, first, rest = run(ones), run(left), run(ones - left)
    for a, b, c in zip(first, rest, whole, strict=True):
        np.testing.assert_allclose(a + b, c, rtol=1e-11, atol=1e-12)
    for a, b in zip(run(0 * ones), whole, strict=True):
        np.testing.assert_array_equal(a, jnp.zeros_like(b))
    for a, b in zip(run(0.5 * ones), whole, strict=True):
        np.testing.assert_allclose(2 * a, b, rtol=1e-12, atol=1e-14)


def test_a_batch_of_padding_alone_is_finite() -> None:
    config = replace(TINY, layers=1, dtype="bfloat16", tied=True)
    params, batch = some_params(config), some_batch(config)
    batch |= {"segments": 0 * batch["segments"], "weights": 0 * batch["weights"]}
    (loss, _), gradient = compiled_gradient(config)(params, batch)
    assert loss == 0
    assert all(jnp.all(leaf == 0) for leaf in jax.tree.leaves(gradient))


def test_an_untrained_model_knows_nothing() -> None:
    model = llama(FRESH)
    params, batch = model.init(jax.random.key(0)), some_batch(FRESH)
    loss, weight, _ = jax.jit(partial(forward, model.units))(params, batch)
    # Logits have a standard deviation of 0.02 * sqrt(64) = 0.16, which adds about 0.16^2 / 2 to ln V, and the
    # targets' own logits 0.16 / sqrt(tokens) of noise.
    assert loss / weight == pytest.approx(np.log(256), abs=0.15)


def test_parameter_counts_are_those_of_llama_3() -> None:
    # The 8B count is the published 8,030,261,248; the others are closed forms of public sizes.
    assert llama(LLAMA3_8B).parameter_count() == 8_030_261_248
    llama3_2_1b = replace(LLAMA3_8B, layers=16, dim=2048, head_dim=64, ffn_dim=8192, tied=True)
    assert llama(llama3_2_1b).parameter_count() == 1_235_814_400
    llama3_70b = replace(LLAMA3_8B, layers=80, dim=8192, heads=64, ffn_dim=28672)
    assert llama(llama3_70b).parameter_count() == 70_553_706_496


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_count_is_the_closed_form_and_what_init_makes(tied: bool) -> None:
    config = replace(TINY, tied=tied, dtype="float32")
    D, V = config.dim, config.vocab_size
    layer = 2 * D + 2 * D * config.head_dim * (config.heads + config.kv_heads) + 3 * D * config.ffn_dim
    count = config.layers * layer + D + V * D * (1 if tied else 2)
    model = llama(config)
    assert model.parameter_count() == count
    made = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(made)) == count


def test_shapes_and_axes_describe_what_init_makes() -> None:
    for dtype in ("bfloat16", "float32"):
        model = llama(replace(TINY, dtype=dtype))
        made = jax.eval_shape(model.init, jax.random.key(0))
        assert model.shapes == made
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(made))
        for unit, leaves in made.items():
            for leaf, array in leaves.items():
                assert len(model.logical_axes[unit][leaf]) == array.ndim


def test_one_logical_axis_has_one_size() -> None:
    model = llama(TINY)
    sizes: dict[str, set[int]] = {}
    for unit in model.units:
        for leaf, axes in unit.logical_axes.items():
            for axis, size in zip(axes, unit.shapes[leaf].shape, strict=True):
                sizes.setdefault(axis, set()).add(size)
    assert sizes == {
        "vocab": {37}, "embed": {12}, "heads": {6}, "kv_heads": {2}, "head_dim": {4}, "ffn": {20}
    }  # fmt: skip


def test_init_has_the_documented_statistics() -> None:
    for leaves in llama(FRESH).init(jax.random.key(0)).values():
        for leaf, array in leaves.items():
            values = np.asarray(array)
            if leaf.endswith("norm"):
                assert np.all(values == 1)
                continue
            std = 0.02 / 2 if leaf in ("wo", "w_down") else 0.02  # 2 = sqrt(2 * 2 layers)
            # Five standard errors of the estimates.
            assert abs(values.mean()) < 5 * std / values.size**0.5
            assert abs(values.std() / std - 1) < 5 / (2 * values.size) ** 0.5


def test_a_units_init_does_not_depend_on_the_depth_of_the_model() -> None:
    shallow, deep = (llama(replace(FRESH, layers=layers)).init(jax.random.key(3)) for layers in (2, 8))
    for unit, leaves in shallow.items():
        for leaf, values in leaves.items():
            # sqrt(8 / 2) = 2: the documented scale of residual projections, exact in binary.
            scale = 2 if leaf in ("wo", "w_down") else 1
            np.testing.assert_array_equal(values, scale * np.asarray(deep[unit][leaf]))


def test_no_two_matrices_start_alike_and_seeds_differ() -> None:
    values = [
        float(np.asarray(array).flat[0])
        for seed in (0, 1)
        for leaves in llama(FRESH).init(jax.random.key(seed)).values()
        for leaf, array in leaves.items()
        if not leaf.endswith("norm")
    ]
    assert len(set(values)) == len(values)


def test_init_is_bitwise_the_same_under_jit() -> None:
    unit = llama(FRESH).units[1]
    key = jax.random.key(5)
    jax.tree.map(np.testing.assert_array_equal, unit.init(key), jax.jit(unit.init)(key))


def test_costs_are_the_forward_flops_of_a_token() -> None:
    costs = {unit.name: unit.cost for unit in llama(LLAMA3_8B).units}
    assert list(costs) == ["embed", *(f"layers.{index}" for index in range(32)), "head"]
    # A layer's matrices hold 218,103,808 weights, two FLOPs each; queries meet 8192 keys and values.
    assert costs["layers.0"] == costs["layers.31"] == 2 * 218_103_808 + 2 * 2 * 8192 * 4096
    assert costs["head"] == 2 * 4096 * 128_256
    assert costs["embed"] == 4096


def test_sizes_that_do_not_fit_are_reported_together() -> None:
    with pytest.raises(ValueError, match="head_dim") as caught:
        LlamaConfig(layers=0, dim=8, heads=3, kv_heads=2, head_dim=5, ffn_dim=8, vocab_size=9)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["layers", "heads", "head_dim"]


def to_hugging_face(config: LlamaConfig, params: Arrays) -> dict[str, np.ndarray]:
    """Our parameters under the names of transformers' LlamaForCausalLM, whose matrices are [out, in]."""
    D = config.dim
    table = params["embed"]["table"]
    state = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": params["head"]["norm"],
        "lm_head.weight": table if config.tied else params["head"]["unembed"].T,
    }
    for index in range(config.layers):
        ours, theirs = params[f"layers.{index}"], f"model.layers.{index}"
        state |= {
            f"{theirs}.input_layernorm.weight": ours["attention_norm"],
            f"{theirs}.post_attention_layernorm.weight": ours["ffn_norm"],
            **{f"{theirs}.self_attn.{name}_proj.weight": ours[f"w{name}"].reshape(D, -1).T for name in "qkv"},
            f"{theirs}.self_attn.o_proj.weight": ours["wo"].reshape(-1, D).T,
            **{f"{theirs}.mlp.{name}_proj.weight": ours[f"w_{name}"].T for name in ("gate", "up", "down")},
        }
    return state


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.usefixtures("x64")
def test_logits_and_loss_agree_with_transformers(tied: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = replace(TINY, tied=tied)
    params, batch = some_params(config), some_batch(config)
    batch["segments"] = jnp.ones_like(batch["segments"])
    batch["positions"] = jnp.tile(jnp.arange(9), (2, 1))
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    ).double()
    state = to_hugging_face(config, to_numpy(params))
    theirs.load_state_dict({name: torch.tensor(values) for name, values in state.items()}, strict=True)
    with torch.no_grad():
        expected = theirs(torch.tensor(np.asarray(batch["tokens"], np.int64))).logits
    chosen = torch.tensor(np.asarray(batch["targets"], np.int64)).flatten()
    losses = torch.nn.functional.cross_entropy(expected.flatten(0, 1), chosen, reduction="none")
    expected_loss = (losses.numpy() * np.asarray(batch["weights"]).ravel()).sum()
    # transformers computes norms, angles and softmax in float32 even in a float64 model.
    np.testing.assert_allclose(compiled_logits(config)(params, batch), expected.numpy(), rtol=0, atol=2e-5)
    np.testing.assert_allclose(loss_sum(config, params, batch), expected_loss, rtol=1e-6)
