"""Rematerialisation: which values of a unit the backward pass keeps, and which it computes again.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jax_titan.models.unit import Model


def rematerialised(model: Model, remat: str) -> Model:
    """The same model, whose units keep less for the backward pass.

    Args:
        model: the units; those without `kept_names` stay as they are.
        remat: "none" keeps everything, "full" only what enters a unit, "dots" also the results of products with
            weights (all `kept_names`), anything else is a list of such names.

    Raises:
        ValueError: a name that no unit has.
    """
    if remat == "none":
        return model
    known = sorted({name for unit in model.units for name in unit.kept_names})
    names = known if remat == "dots" else [] if remat == "full" else [name.strip() for name in remat.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]!r} is no value of the model {model.name}; these are: {', '.join(known)}")
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    # One wrapper for each function, so that units that were alike still are.
    wrapped: dict[int, Callable[..., Any]] = {}

    def wrap(apply: Callable[..., Any]) -> Callable[..., Any]:
        return wrapped.setdefault(id(apply), jax.checkpoint(apply, policy=policy))

    units = [dataclasses.replace(u, apply=wrap(u.apply)) if u.kept_names else u for u in model.units]
    return dataclasses.replace(model, units=tuple(units))
