"""The contract of a chain of units: what is checked, and what a key depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_titan.models.unit import Model, Parameter, Unit, forward, logits, normal, ones, unit_key


def unit(name: str, shares: tuple[str, ...] = ()) -> Unit:
    """A unit that adds its parameter, and those it shares, to the carry."""
    return Unit(
        name=name,
        parameters={"bias": Parameter((), (), ones)},
        apply=lambda params, shared, carry, batch: (
            (carry or 0.0) + params["bias"] + sum(other["bias"] for other in shared.values())
        ),
        cost=1.0,
        shares=shares,
    )


def test_a_model_names_everything_wrong_with_its_chain() -> None:
    with pytest.raises(ValueError, match=r"'a' occurs twice; .*'b' shares 'head', .*'b' shares 'b'"):
        Model("bad", (unit("a"), unit("a"), unit("b", ("head", "b")), unit("head")))
    with pytest.raises(ValueError, match="at least one unit"):
        Model("empty", ())


def test_forward_gives_each_unit_exactly_what_it_shares() -> None:
    seen = {}

    def record(params, shared, carry, batch):
        seen.update(shared)
        return carry

    last = Unit("last", {}, record, 1.0, shares=("first",))
    params = {"first": {"bias": jnp.ones(())}, "second": {"bias": jnp.zeros(())}, "last": {}}
    forward((unit("first"), unit("second"), last), params, {})
    assert seen == {"first": params["first"]}


def test_forward_continues_from_a_carry() -> None:
    model = Model("sum", (unit("a"), unit("b"), unit("c", ("a",))))
    params = model.init(jax.random.key(0))
    assert forward(model.units, params, {}) == 4
    assert forward(model.units[2:], params, {}, carry=forward(model.units[:2], params, {})) == 4


def test_logits_of_a_chain_without_them_are_refused() -> None:
    with pytest.raises(ValueError, match="'a' has no logits"):
        logits((unit("a"),), {"a": {"bias": jnp.ones(())}}, {})


def test_a_parameter_names_every_dimension() -> None:
    with pytest.raises(ValueError, match=r"2 dimensions .* 1 axes"):
        Parameter((2, 3), ("embed",), ones)


def test_float64_parameters_are_refused_where_jax_would_narrow_them() -> None:
    with pytest.raises(ValueError, match="need x64"):
        Parameter((2,), ("embed",), ones, dtype="float64").init(jax.random.key(0))


def test_keys_of_names_are_pinned() -> None:
    # Checkpoints of a seed are reproducible for years only if these never change: crc32("layers.0") is
    # 0x08070E66.
    expected = jax.random.fold_in(jax.random.key(7), np.uint32(0x08070E66))
    for key in (
        unit_key(jax.random.key(7), "layers.0"),
        jax.jit(unit_key, static_argnums=1)(jax.random.key(7), "layers.0"),
    ):
        assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(expected))


def test_keys_of_different_names_differ() -> None:
    names = ["embed", "head", *(f"layers.{index}" for index in range(200))]
    keys = {tuple(np.asarray(jax.random.key_data(unit_key(jax.random.key(0), name)))) for name in names}
    assert len(keys) == len(names)


def test_adding_a_parameter_changes_no_other() -> None:
    small = {"w": Parameter((4, 4), ("embed", "ffn"), normal(0.1))}
    large = {"a": Parameter((2,), ("embed",), normal(0.1)), **small}
    key = jax.random.key(0)
    first, second = (Unit("u", parameters, lambda p, s, c, b: c, 1.0).init(key) for parameters in (small, large))
    np.testing.assert_array_equal(first["w"], second["w"])
