"""Decoding token by token with a cache, for any chain of units.

A row of the batch is one document, and a token's place in the cache is its position. Rows may have different
lengths: padding is marked by segment 0 wherever it stands, and enters no cache. So the same function serves for a
prompt (all its tokens at once, or piece by piece) and for every token after it:

    cache = empty_cache(model, batch_size, length)
    logits, cache = step(params, {"tokens": ..., "positions": ..., "segments": ...}, cache)  # [B, T] each
    while ...:
        logits, cache = step(params, ..., cache)  # [B, 1] each

where `step` is `jax.jit(partial(decode, model, last_only=True), donate_argnums=2)`: compiled once for each T, and
the cache is written in place. A row's cache may be used again for another document from position 0 on, as it is.

Shape suffixes: B sequences, T new tokens of a sequence, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_titan.models.unit import Batch, Cache, Carry, Model, Params, shared_params


def cache_shapes(model: Model, batch_size: int, length: int) -> dict[str, Cache]:
    """Shape and dtype of a cache by unit name, nothing allocated; units that keep nothing are left out.

    Args:
        model: a model that predicts tokens.
        batch_size: sequences.
        length: tokens a sequence, of the prompt and what comes after it.
    """
    return {unit.name: unit.cache(batch_size, length) for unit in model.units if unit.cache is not None}


def empty_cache(model: Model, batch_size: int, length: int) -> dict[str, Cache]:
    """A cache of no tokens; for arguments see `cache_shapes`."""
    shapes = cache_shapes(model, batch_size, length)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def decode(
    model: Model,
    params: Mapping[str, Params],
    batch: Batch,
    cache: Mapping[str, Cache],
    last_only: bool = False,
) -> tuple[jax.Array, dict[str, Cache]]:
    """Logits of new tokens, given those in the cache, which they enter.

    Args:
        model: a model that predicts tokens.
        params: parameters by unit name.
        batch: `tokens`, `positions` and `segments` [B, T] of the new tokens; others are not read. The tokens of a
            row continue it: their positions are those after what its cache holds, and less than the cache's
            length (a token beyond it would be left out of the cache, and those after it would not see it).
            Segment 0 is padding.
        cache: from `empty_cache` or an earlier call.
        last_only: only for the last token of each row that is not padding; saves the logits of a whole prompt.

    Returns:
        (logits, cache): logits_BTV in at least float32, or [B, 1, V] with `last_only`; those of padding, or of a
        row of padding alone, have no meaning.

    Raises:
        ValueError: the last unit has no logits.
    """
    *body, head = model.units
    if head.logits is None:
        raise ValueError(f"unit {head.name!r} has no logits")
    carry: Carry = None
    written: dict[str, Any] = {}
    for unit in body:
        shared = shared_params(unit, params)
        if unit.decode is None:
            carry = unit.apply(params[unit.name], shared, carry, batch)
        else:
            carry, written[unit.name] = unit.decode(params[unit.name], shared, carry, batch, cache[unit.name])
    if last_only:
        carry = _last(carry, batch["segments"])
    return head.logits(params[head.name], shared_params(head, params), carry), written


def _last(carry: Carry, segments_BT: jax.Array) -> Carry:
    """Every leaf [B, T, ...] of the carry as [B, 1, ...]: at the last token of each row that is not padding."""
    T = segments_BT.shape[1]
    last_B = jnp.max(jnp.where(segments_BT != 0, jnp.arange(T), 0), axis=1)
    rows_B1 = jnp.arange(len(segments_BT))[:, None]
    return jax.tree.map(lambda leaf: leaf[rows_B1, last_B[:, None]], carry)
