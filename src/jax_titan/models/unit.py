"""A model is a chain of units: the contract between models and everything that trains them.

The first unit reads the batch, each unit hands a carry to the next, and the last returns a loss. Any layout
may cut the chain between any two units. Parameters are keyed by unit name, never by stage or position, so
neither an initialisation nor a checkpoint depends on how the model was cut.

Shape suffixes: B sequences of a batch, T tokens of a sequence, V vocabulary.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

type Params = Mapping[str, jax.Array]
"""One unit's parameters: a flat mapping from leaf name to array."""

type Batch = Mapping[str, jax.Array]
"""int32 `tokens`, `targets`, `segments` (0 is padding), `positions` and float32 `weights`, all [B, T]."""

type Carry = Any
"""Any pytree: None before the first unit, `(loss_sum, weight_sum, metrics)` after the last."""

type Cache = Any
"""What a unit keeps of the tokens it has seen, any pytree of arrays [B, ...]."""

type Initializer = Callable[[jax.Array, tuple[int, ...], str], jax.Array]
"""(key, shape, dtype) -> array, the same numbers with and without `jax.jit`."""


def ones(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """The initializer of scales: all ones, whatever the key."""
    return jnp.ones(shape, dtype)


def normal(std: float) -> Initializer:
    """The initializer that draws from a normal distribution of mean 0 and standard deviation `std`.

    Two with the same `std` are equal, so that units of the same structure are known to start alike.
    """
    return _Normal(std)


@dataclass(frozen=True)
class _Normal:
    std: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
        return _normal(self.std, key, shape, dtype)


# Compiled as one program even when called eagerly: op by op, XLA could round otherwise than it does in the
# fused program under an outer `jax.jit`, and a first value must not depend on who asks for it.
@partial(jax.jit, static_argnums=(0, 2, 3))
def _normal(std: float, key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return std * jax.random.normal(key, shape, dtype)


@dataclass(frozen=True)
class Parameter:
    """One leaf of a unit's parameters, declared once.

    Args:
        shape: its dimensions.
        axes: the logical name of each dimension, which a layout's table maps to mesh axes.
        initializer: draws its first value.
        dtype: what it is stored and updated in; what is computed in is the model's affair.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    initializer: Initializer
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{len(self.shape)} dimensions {self.shape} but {len(self.axes)} axes {self.axes}")

    def init(self, key: jax.Array) -> jax.Array:
        """The first value, a pure function of `key`.

        Raises:
            ValueError: the dtype is float64 while JAX would silently make it float32.
        """
        if self.dtype == "float64" and not jax.config.jax_enable_x64:
            raise ValueError("float64 parameters need x64: jax.config.update('jax_enable_x64', True)")
        return self.initializer(key, self.shape, self.dtype)


@dataclass(frozen=True, eq=False)
class Unit:
    """A link of the chain: the smallest part of a model that a layout places.

    Args:
        name: unique in the model ("embed", "layers.0", ..., "head").
        parameters: leaf name to declaration, from which shapes, logical axes and first values follow.
        apply: `(params, shared, carry, batch) -> carry`, pure. `shared` maps exactly the names in `shares` to
            those units' parameters. The first unit gets the carry None; the last returns `(loss_sum,
            weight_sum, metrics)`: the sum over tokens of weight times negative log-likelihood and the sum of
            weights, both scalars in at least float32, and a dict of scalars, often empty. Dividing one by the
            other is left to whoever knows the weight of the whole global batch.
        cost: forward FLOPs a token, a multiply-add counted as two, for balancing stages.
        shares: names of earlier units whose parameters it reuses.
        logits: `(params, shared, carry) -> logits_BTV` of a last unit that predicts tokens; None for others.
        kept_names: what `jax.ad_checkpoint.checkpoint_name` calls the values inside `apply` that a backward pass
            may keep when the rest of the unit is computed again (`train.remat`). None: the unit is never
            recomputed.
        cache: `(batch_size, length) -> cache`, as shapes: what the unit keeps of up to `length` tokens a sequence
            to give the next ones without those before. None: the unit looks at each token alone, so `apply` serves
            for decoding too.
        decode: `(params, shared, carry, batch, cache) -> (carry, cache)`: `apply` for the tokens of `batch` that
            come after those in the cache, which they enter. None where `cache` is. A sequence is one document; its
            rows may be at different positions, and segment 0 is padding, which enters no cache. See
            `models.decode`.
    """

    name: str
    parameters: Mapping[str, Parameter]
    apply: Callable[[Params, Mapping[str, Params], Carry, Batch], Carry]
    cost: float
    shares: tuple[str, ...] = ()
    logits: Callable[[Params, Mapping[str, Params], Carry], jax.Array] | None = None
    kept_names: tuple[str, ...] = ()
    cache: Callable[[int, int], Cache] | None = None
    decode: Callable[[Params, Mapping[str, Params], Carry, Batch, Cache], tuple[Carry, Cache]] | None = None

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """First values of the parameters.

        Args:
            key: the unit's own key; see `unit_key`.

        Returns:
            Leaf name to array. Each leaf draws from a key of its own, so adding one changes no other.
        """
        return {leaf: parameter.init(unit_key(key, leaf)) for leaf, parameter in self.parameters.items()}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every parameter, nothing allocated."""
        return {
            leaf: jax.ShapeDtypeStruct(parameter.shape, np.dtype(parameter.dtype))
            for leaf, parameter in self.parameters.items()
        }

    @property
    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        """The logical axis names of every parameter, one a dimension."""
        return {leaf: parameter.axes for leaf, parameter in self.parameters.items()}

    def parameter_count(self) -> int:
        """Number of parameters the unit owns; shared ones count where they are owned."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters.values())


@dataclass(frozen=True, eq=False)
class Model:
    """A checked chain of units.

    Args:
        name: what to call it in records and messages.
        units: the chain, in order.

    Raises:
        ValueError: the chain is empty, a name occurs twice, or a unit shares what does not come before it or has
            only one of `cache` and `decode`.
    """

    name: str
    units: tuple[Unit, ...]

    def __post_init__(self) -> None:
        problems = [] if self.units else ["a model needs at least one unit"]
        seen: set[str] = set()
        for unit in self.units:
            if unit.name in seen:
                problems.append(f"unit name {unit.name!r} occurs twice")
            problems += [
                f"unit {unit.name!r} shares {other!r}, which is no earlier unit"
                for other in unit.shares
                if other not in seen
            ]
            if (unit.cache is None) != (unit.decode is None):
                problems.append(f"unit {unit.name!r} needs both cache and decode, or neither")
            seen.add(unit.name)
        if problems:
            raise ValueError(f"model {self.name!r}: " + "; ".join(problems))

    def init(self, key: jax.Array) -> dict[str, dict[str, jax.Array]]:
        """First values of all parameters by unit name, from the run's key."""
        return {unit.name: unit.init(unit_key(key, unit.name)) for unit in self.units}

    @property
    def shapes(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Shape and dtype of every parameter by unit name, nothing allocated."""
        return {unit.name: unit.shapes for unit in self.units}

    @property
    def logical_axes(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Logical axis names of every parameter by unit name."""
        return {unit.name: unit.logical_axes for unit in self.units}

    def parameter_count(self) -> int:
        """Number of parameters, shared ones once."""
        return sum(unit.parameter_count() for unit in self.units)


def unit_key(key: jax.Array, name: str) -> jax.Array:
    """The key of the unit (or leaf) called `name`, derived from the name alone.

    It depends on no count and no order: the same unit draws the same numbers however deep the model is and
    however it is cut, inside or outside `jax.jit`, in any process.
    """
    return jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))


def shared_params(unit: Unit, params: Mapping[str, Params]) -> dict[str, Params]:
    """What `unit.apply` expects as `shared`, taken from parameters keyed by unit name."""
    return {name: params[name] for name in unit.shares}


def forward(units: Sequence[Unit], params: Mapping[str, Params], batch: Batch, carry: Carry = None) -> Carry:
    """Runs a chain, or a piece of one, on one device: the reference for every layout.

    Args:
        units: consecutive units.
        params: parameters by unit name; must hold the units' own and the shared ones.
        batch: the batch, [B, T] each.
        carry: what the unit before the first of `units` returned; None at the start of the chain.

    Returns:
        What the last of `units` returns; `(loss_sum, weight_sum, metrics)` at the end of the chain.
    """
    for unit in units:
        carry = unit.apply(params[unit.name], shared_params(unit, params), carry, batch)
    return carry


def logits(units: Sequence[Unit], params: Mapping[str, Params], batch: Batch) -> jax.Array:
    """Logits of a whole chain on one device.

    Args:
        units: all units of a model that predicts tokens.
        params: parameters by unit name.
        batch: the batch, [B, T] each; targets and weights are not read.

    Returns:
        logits_BTV in at least float32.

    Raises:
        ValueError: the last unit has no logits.
    """
    *body, head = units
    if head.logits is None:
        raise ValueError(f"unit {head.name!r} has no logits")
    return head.logits(params[head.name], shared_params(head, params), forward(body, params, batch))
