"""The state of training: what it is, how its arrays are split over a mesh, and how it is born there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_titan.models.unit import Model, Unit, unit_key
from jax_titan.parallel.sharding import spec_of
from jax_titan.trainer.optimizer import Optimizer

type Load = Callable[[Any], Any]
"""Abstract parameters by unit -> the parameters."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params", "optimizer", "workspace"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What training changes.

    Attributes:
        params, optimizer: by unit name.
        workspace: the layout's own: accumulators and replicas, which it can make anew from the rest.
    """

    params: Any
    optimizer: Any
    workspace: Any = None


def abstract_params(unit: Unit, mesh: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """One unit's parameters with the sharding of each leaf on a mesh (or an abstract one), nothing allocated."""
    sizes = dict(mesh.shape)
    return {
        leaf: jax.ShapeDtypeStruct(
            shape.shape,
            shape.dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*spec_of(unit.logical_axes[leaf], shape.shape, sizes))),
        )
        for leaf, shape in unit.shapes.items()
    }


def abstract_optimizer(unit: Unit, optimizer: Optimizer, mesh: Any, stacked: bool = False) -> Any:
    """One unit's optimizer state: what has the form of a parameter is split as it is, the rest is everywhere."""
    params = abstract_params(unit, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    init = jax.vmap(optimizer.transformation.init) if stacked else optimizer.transformation.init

    def placed(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return optax.tree_utils.tree_map_params(
        optimizer.transformation,
        lambda leaf, param: placed(leaf, param.sharding),
        jax.eval_shape(init, unit.shapes),
        params,
        transform_non_params=lambda leaf: placed(leaf, everywhere),
    )


def abstract_state(
    model: Model, optimizer: Optimizer, meshes: Mapping[str, Any], stacked: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Abstract `params` and `optimizer` by unit.

    Args:
        model: the units.
        optimizer: whose state it is.
        meshes: the mesh of each unit, by name.
        stacked: names of units that stand for several, see `stack`.
    """
    return {
        "params": {unit.name: abstract_params(unit, meshes[unit.name]) for unit in model.units},
        "optimizer": {
            unit.name: abstract_optimizer(unit, optimizer, meshes[unit.name], unit.name in stacked)
            for unit in model.units
        },
    }


# Initialisation runs once, so compiling it fast matters more than running it fast.
_COMPILE_FAST = {"xla_backend_optimization_level": 0}


def first_state(
    model: Model, optimizer: Optimizer, seed: int, meshes: Mapping[str, Mesh], load: Load | None = None
) -> tuple[dict, dict]:
    """First parameters and optimizer state by unit, computed on the devices that will hold them.

    Args:
        model, optimizer, meshes: as in `abstract_state`.
        seed: of the run.
        load: reads the parameters, given what `abstract_state` says of them, instead of drawing them.
    """
    if load is not None:
        return _loaded_state(model, optimizer, meshes, load)

    def lowered(unit: Unit) -> jax.stages.Lowered:
        def first(key):
            params = unit.init(key)
            return params, optimizer.transformation.init(params)

        mesh = meshes[unit.name]
        abstract = (abstract_params(unit, mesh), abstract_optimizer(unit, optimizer, mesh))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        return jax.jit(first, out_shardings=shardings).lower(_replicated(jax.random.key(seed), mesh))

    # One program for all units of the same structure and home. Traced here, since settings such as x64 belong to
    # this thread; compiled two at a time.
    alike = {unit.name: (*sorted(unit.parameters.items()), meshes[unit.name]) for unit in model.units}
    units = {alike[unit.name]: unit for unit in model.units}
    programs = {structure: lowered(unit) for structure, unit in units.items()}
    with ThreadPoolExecutor(max_workers=2) as pool:
        ready = pool.map(lambda program: program.compile(_COMPILE_FAST), programs.values())
        compiled = dict(zip(programs, ready, strict=True))
    params, state = {}, {}
    for unit in model.units:
        key = _replicated(unit_key(jax.random.key(seed), unit.name), meshes[unit.name])
        params[unit.name], state[unit.name] = compiled[alike[unit.name]](key)
    return params, state


def _loaded_state(model: Model, optimizer: Optimizer, meshes: Mapping[str, Mesh], load: Load) -> tuple[dict, dict]:
    abstract = abstract_state(model, optimizer, meshes)
    params = load(abstract["params"])
    state = {}
    for name, own in params.items():
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract["optimizer"][name])
        state[name] = jax.jit(optimizer.transformation.init, out_shardings=shardings)(own)
    return params, state


def _replicated(x: Any, mesh: Mesh) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
