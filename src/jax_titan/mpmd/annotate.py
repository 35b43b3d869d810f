"""Naming the parts of a single-device function: `stage("encoder")(fn)`.

A named part is a call-like primitive that differentiates, vectorises and rematerialises like the function it
holds. Under plain `jax.jit` it lowers to an ordinary call, so the annotated function is its own single-device
reference. Only while `lowering_for_partitioner()` is active does it lower to `mpmd.named_computation`, from which
the partitioner cuts one program a stage. A transposed part (the backward of a stage) keeps its name and counts
how often it was transposed: that is how forward and backward fragments are told apart later.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core as jex
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import mpmd
from jax.interpreters import mlir

_thread = threading.local()


@contextlib.contextmanager
def lowering_for_partitioner() -> Iterator[None]:
    """While active in this thread, named parts lower to the partitioner's dialect."""
    before = getattr(_thread, "active", False)
    _thread.active = True
    try:
        yield
    finally:
        _thread.active = before


def stage[**P, R](name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Name a part of a function, so that a pipeline can place it on a stage.

    Args:
        name: the part's name; an assignment maps it to a submesh. Several parts may carry the same name.

    Returns:
        A decorator. The decorated function takes and returns pytrees of arrays, as before.

    Example:
        >>> hidden = stage("encoder")(encode)(encoder_params, inputs)
        >>> loss = stage("decoder")(decode)(decoder_params, hidden, targets)
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> R:
            leaves, in_tree = jax.tree.flatten((args, kwargs))
            constants, jaxpr, out_tree = _trace(function, leaves, in_tree)
            results = named_part_p.bind(*constants, *leaves, call_jaxpr=jaxpr, name=name, transpose_count=0)
            return jax.tree.unflatten(out_tree, results)

        return named

    return decorate


def _trace(function: Callable, leaves: list, in_tree: Any) -> tuple[list, Any, Any]:
    """Trace `function` to a jaxpr without constants; what it closes over comes first among the arguments."""
    out_tree = None

    def flat(*flat_args):
        nonlocal out_tree
        args, kwargs = jax.tree.unflatten(in_tree, flat_args)
        results, out_tree = jax.tree.flatten(function(*args, **kwargs))
        return results

    jaxpr = jax.make_jaxpr(flat)(*leaves)
    constants = list(jaxpr.consts)
    if constants:
        closed, count = jaxpr, len(constants)
        jaxpr = jax.make_jaxpr(
            lambda *xs: jax.core.eval_jaxpr(closed.jaxpr, xs[:count], *xs[count:])  # pyright: ignore
        )(*constants, *leaves)
    return constants, jaxpr, out_tree


named_part_p = jex.Primitive("mpmd_named_part")


def _transpose(cotangents, *args, call_jaxpr, name, transpose_count):
    return jex.eval_jaxpr_transpose(
        named_part_p,
        cotangents,
        *args,
        call_jaxpr=call_jaxpr,
        name=name,
        transpose_count=transpose_count + 1,
    )


jex.register_call_primitive_rules(named_part_p, name="mpmd_named_part", transpose_rule=_transpose)


def _lower(ctx, *args, call_jaxpr, name, transpose_count):
    if not getattr(_thread, "active", False):
        return mlir.core_call_lowering(ctx, *args, name=name, call_jaxpr=call_jaxpr)
    if not ctx.avals_out:
        return []
    mpmd.register_dialect(ctx.module_context.context)
    result_types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    origin = mpmd.UserOriginAttr.get(name, transpose_count)
    op = mpmd.NamedComputationOp(result_types, args, origin)
    block = op.region.blocks.append(*[arg.type for arg in args])
    with ir.InsertionPoint(block):
        body = mlir.lower_fun(jex.jaxpr_as_fun(call_jaxpr), multiple_results=True)
        mpmd.ReturnOp(_flatten(body(ctx, *block.arguments)))
    return list(op.results)


def _flatten(values: Any) -> list[ir.Value]:
    """Results of a lowering: one value each, or several for an extended dtype such as a PRNG key."""
    return [values] if isinstance(values, ir.Value) else [leaf for value in values for leaf in _flatten(value)]


mlir.register_lowering(named_part_p, _lower, cacheable=False)
