"""A named part computes, differentiates and vectorises like the function that it holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_titan.mpmd.annotate import stage

X = jnp.linspace(-1.0, 1.0, 6)


def plain(x):
    return jnp.sin(x) * x**2


TRANSFORMS = {
    "call": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "second derivative": lambda f: jax.vmap(jax.grad(jax.grad(f))),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x + 1,))[1],
    "vmap": jax.vmap,
    "checkpoint": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, y: (c, f(y)), 0, x)[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformations_see_through_a_name(name):
    transform = TRANSFORMS[name]
    expected, found = transform(plain)(X), transform(stage("part")(plain))(X)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_pytrees_keyword_arguments_and_integers_pass():
    def function(tree, *, index):
        return {"picked": tree["a"][index], "sum": tree["b"].sum()}

    tree = {"a": jnp.arange(4.0), "b": jnp.arange(3)}
    assert jax.tree.map(float, stage("part")(function)(tree, index=jnp.int32(2))) == {
        "picked": 2.0,
        "sum": 3.0,
    }


def test_what_a_part_closes_over_gets_a_gradient():
    def outer(w):
        doubled = 2 * w
        return stage("part")(lambda x: doubled * x)(w)

    assert jax.jit(jax.grad(outer))(3.0) == pytest.approx(12.0)


def test_the_name_and_the_count_of_transpositions_are_in_the_jaxpr():
    text = str(jax.make_jaxpr(jax.grad(lambda x: stage("part")(plain)(x).sum()))(X))
    assert "name=part" in text
    assert "transpose_count=1" in text


def test_an_error_inside_a_part_is_the_users_own():
    def wrong(x):
        return x @ jnp.ones((5, 5))

    with pytest.raises(TypeError, match="contracting"):
        stage("part")(wrong)(X)
