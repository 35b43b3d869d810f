"""Stacking: runs of alike units as one unit that scans over them, so that a program does not grow with depth.

A stacked unit holds the same parameters with one dimension more. Only the layout that runs it knows: a
checkpoint, like the rest of the program, has the units as they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_titan.models.unit import Batch, Carry, Model, Parameter, Params, Unit

type ByUnit = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Stacking:
    """A model in which runs of alike units are one.

    Attributes:
        model: with the stacked units.
        members: the names of the units in each stacked one, by its name.
    """

    model: Model
    members: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, model: Model) -> Stacking:
        """Stack every run of two or more units that apply one function to equally declared parameters."""
        units, members = [], {}
        for run in _runs(model.units):
            if len(run) == 1:
                units += run
                continue
            stacked = _stacked(run)
            units.append(stacked)
            members[stacked.name] = tuple(unit.name for unit in run)
        return cls(dataclasses.replace(model, units=tuple(units)), members)

    def join(self, by_unit: ByUnit, place: Any) -> dict[str, Any]:
        """Stack the trees of the members; uses up what it is given.

        One leaf after another, each freed when it is stacked, so that no device holds two copies of the state.

        Args:
            by_unit: arrays by unit, leaves deleted here once they are stacked.
            place: shardings of the result, by unit.
        """
        result = {}
        rest = dict(by_unit)
        for unit in self.model.units:
            if unit.name not in self.members:
                result[unit.name] = rest.pop(unit.name)
                continue
            trees = [rest.pop(name) for name in self.members[unit.name]]
            shardings, tree = jax.tree.flatten(place[unit.name])
            leaves = zip(*(jax.tree.leaves(one) for one in trees), strict=True)
            stacked = []
            for parts, sharding in zip(leaves, shardings, strict=True):
                stacked.append(jax.block_until_ready(jax.jit(_stack, out_shardings=sharding)(parts)))
                for part in parts:
                    part.delete()
            result[unit.name] = jax.tree.unflatten(tree, stacked)
        return result

    def split_on_host(self, by_unit: ByUnit) -> dict[str, Any]:
        """The trees of the members of a stacked state, as copies in host memory; other units as they are."""
        result = {}
        for name, tree in by_unit.items():
            if name not in self.members:
                result[name] = tree
                continue
            # A copy, since a view of an array on the CPU would change with the next step.
            host = jax.tree.map(lambda x: np.array(x, copy=True), tree)
            for index, member in enumerate(self.members[name]):
                result[member] = jax.tree.map(lambda x, i=index: np.asarray(x[i]), host)
        return result


def _stack(parts: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(parts)


def _runs(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Maximal runs of units that can share one program."""
    run: list[Unit] = []
    for unit in units:
        if run and not _alike(run[-1], unit):
            yield run
            run = []
        run.append(unit)
    yield run


def _alike(a: Unit, b: Unit) -> bool:
    return a.apply is b.apply and a.parameters == b.parameters and a.shares == b.shares


def _stacked(run: Sequence[Unit]) -> Unit:
    first = run[0]

    def apply(params: Params, shared: Mapping[str, Params], carry: Carry, batch: Batch) -> Carry:
        def body(carry, one):
            return first.apply(one, shared, carry, batch), None

        return jax.lax.scan(body, carry, params)[0]

    parameters = {
        leaf: Parameter((len(run), *one.shape), ("layers", *one.axes), one.initializer, one.dtype)
        for leaf, one in first.parameters.items()
    }
    cost = sum(unit.cost for unit in run)
    return Unit(f"{first.name}...{run[-1].name}", parameters, apply, cost, first.shares)
