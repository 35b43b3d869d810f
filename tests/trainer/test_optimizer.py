"""AdamW, its schedule and its clipping are the published formulas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_titan.trainer.optimizer import adamw, sum_of_squares

SETTINGS: dict[str, Any] = {
    "learning_rate": 0.02,
    "schedule": "cosine",
    "steps": 50,
    "warmup_steps": 5,
    "final_fraction": 0.1,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
}


def rates(**changes):
    settings = SETTINGS | changes
    rate: Any = adamw(**settings).learning_rate
    return np.array([float(rate(step)) for step in range(settings["steps"])])


def test_the_warm_up_is_linear_and_its_first_update_moves():
    np.testing.assert_allclose(rates()[:5], 0.02 * np.arange(1, 6) / 5, rtol=1e-6)


def test_the_cosine_falls_from_the_peak_to_the_final_fraction():
    found = rates()[5:]
    t = np.arange(45) / 45
    expected = 0.02 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * t)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_constant_rate_stays():
    np.testing.assert_allclose(rates(schedule="constant")[5:], 0.02, rtol=1e-6)


def test_a_warm_up_longer_than_the_run_only_rises():
    found = rates(warmup_steps=80)
    np.testing.assert_allclose(found, 0.02 * np.arange(1, 51) / 80, rtol=0, atol=0.02 * 2**-22)


@pytest.mark.parametrize("warmup_steps", [0, 1, 50])
def test_any_length_of_warm_up_gives_finite_rates_up_to_the_peak(warmup_steps):
    found = rates(warmup_steps=warmup_steps)
    assert np.all(found > 0)
    assert found.max() == pytest.approx(0.02)


def test_updates_are_those_of_the_paper():
    # Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with decay scaled by the learning rate.
    with jax.enable_x64():
        optimizer = adamw(**SETTINGS)
        generator = np.random.default_rng(0)
        w = {"matrix": generator.normal(size=(3, 4)), "norm": generator.normal(size=4)}
        params, state = jax.tree.map(jnp.asarray, w), optimizer.transformation.init(jax.tree.map(jnp.asarray, w))
        m, v = {k: 0 * x for k, x in w.items()}, {k: 0 * x for k, x in w.items()}
        schedule = rates()
        for t in range(1, 13):
            gradients = {k: generator.normal(size=x.shape) for k, x in w.items()}
            updates, state = optimizer.transformation.update(jax.tree.map(jnp.asarray, gradients), state, params)
            params = jax.tree.map(jnp.add, params, updates)
            for k, g in gradients.items():
                m[k] = 0.9 * m[k] + 0.1 * g
                v[k] = 0.95 * v[k] + 0.05 * g**2
                step = (m[k] / (1 - 0.9**t)) / (np.sqrt(v[k] / (1 - 0.95**t)) + 1e-8)
                decay = 0.1 * w[k] if k == "matrix" else 0.0
                w[k] = w[k] - schedule[t - 1] * (step + decay)
                np.testing.assert_allclose(params[k], w[k], rtol=1e-6)


def test_clipping_scales_down_to_the_norm_and_never_up():
    optimizer = adamw(**SETTINGS)
    assert optimizer.clip_factor(jnp.float32(4.0)) == pytest.approx(0.25)
    assert optimizer.clip_factor(jnp.float32(0.5)) == 1.0
    assert optimizer.clip_factor(jnp.float32(0.0)) == 1.0
    assert adamw(**{**SETTINGS, "clip_norm": 0.0}).clip_factor(jnp.float32(4.0)) is None


def test_the_global_norm_is_over_all_leaves():
    tree = {"a": jnp.array([3.0, 0.0]), "b": {"c": jnp.array([[4.0]])}}
    assert float(sum_of_squares(tree)) == pytest.approx(25.0)


def test_a_narrow_state_is_rounded_once_an_update_and_computed_in_float32():
    """Against AdamW in float64 whose two means are rounded to bfloat16 after each update."""
    import ml_dtypes

    rng = np.random.default_rng(3)
    settings: dict[str, Any] = {**SETTINGS, "schedule": "constant", "warmup_steps": 0, "learning_rate": 0.01}
    narrow: Any = adamw(**settings, state_dtype="bfloat16").transformation
    params = {"w": jnp.asarray(rng.normal(size=(5, 7)), jnp.float32)}
    state = narrow.init(params)

    def rounded(x):
        return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)

    expected = np.asarray(params["w"], np.float64)
    mu, nu = np.zeros_like(expected), np.zeros_like(expected)
    for step in range(1, 21):
        gradient = rng.normal(size=(5, 7)).astype(np.float32)
        updates, state = narrow.update({"w": jnp.asarray(gradient)}, state, params)
        assert updates["w"].dtype == jnp.float32
        params = jax.tree.map(jnp.add, params, updates)
        mu = settings["b1"] * mu + (1 - settings["b1"]) * gradient
        nu = settings["b2"] * nu + (1 - settings["b2"]) * gradient.astype(np.float64) ** 2
        corrected = (mu / (1 - settings["b1"] ** step), nu / (1 - settings["b2"] ** step))
        change = corrected[0] / (np.sqrt(corrected[1]) + settings["eps"]) + settings["weight_decay"] * expected
        expected = expected - settings["learning_rate"] * change
        mu, nu = rounded(mu), rounded(nu)
        np.testing.assert_allclose(np.asarray(params["w"]), expected, rtol=0, atol=1e-6)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(state) if leaf.ndim}
    assert dtypes == {"bfloat16"}
    plain = adamw(**settings, state_dtype="float32").transformation.init(params)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(plain) if np.ndim(leaf)} == {"float32"}


def test_a_state_of_wider_parameters_keeps_their_precision():
    with jax.enable_x64(True):
        params = {"w": jnp.ones((3, 2), jnp.float64)}
        state = adamw(**SETTINGS, state_dtype="bfloat16").transformation.init(params)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(state) if leaf.ndim} == {"float64"}
