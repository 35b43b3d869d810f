"""A small function with named parts, not a language model, that the tests of this room cut and run."""

import jax
import jax.numpy as jnp

from jax_titan.mpmd.annotate import stage

WIDTH, ROWS = 8, 4


def loss(weights, inputs, targets, stages):
    """A chain of tanh layers, one a stage, and a squared error; `targets` holds one copy a stage."""
    x = inputs
    for s in range(stages):
        last = s == stages - 1

        def run(w, x, t, last=last):
            y = jnp.tanh(x @ w["matrix"] + w["shift"])
            return jnp.sum((y - t) ** 2) if last else y

        x = stage(f"stage{s}")(run)(weights[s], x, targets[s])
    return x


def weights(stages, seed=0):
    keys = jax.random.split(jax.random.key(seed), stages)
    return [
        {"matrix": jax.random.normal(key, (WIDTH, WIDTH)) * 0.5, "shift": jnp.full((WIDTH,), 0.1)} for key in keys
    ]


def accumulate(stages):
    """(accumulator, weights, replicas, microbatch) -> accumulator"""

    def function(accumulator, weights, replicas, microbatch):
        value, gradients = jax.value_and_grad(loss)(weights, microbatch["x"], microbatch["t"], stages)
        return jax.tree.map(jnp.add, accumulator, {"loss": value, "gradients": gradients})

    return function


def update(stages):
    """One step of gradient descent; its third result is an empty accumulator."""

    def function(weights, optimizer, accumulator, scalars):
        new, zeros = [], []
        for s in range(stages):

            def apply(w, g, rate):
                return jax.tree.map(lambda a, b: a - rate * b, w, g), jax.tree.map(jnp.zeros_like, g)

            w, z = stage(f"stage{s}")(apply)(weights[s], accumulator["gradients"][s], scalars[s])
            new.append(w)
            zeros.append(z)
        value, zero = stage(f"stage{stages - 1}")(lambda x: (x, jnp.zeros_like(x)))(accumulator["loss"])
        return new, optimizer, {"loss": zero, "gradients": zeros}, {"loss": value}

    return function


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def microbatches(count, stages, seed=1):
    keys = jax.random.split(jax.random.key(seed), count)
    return [
        {
            "x": jax.random.normal(key, (ROWS, WIDTH)),
            "t": [jax.random.normal(jax.random.fold_in(key, 1), (ROWS, WIDTH))] * stages,
        }
        for key in keys
    ]
