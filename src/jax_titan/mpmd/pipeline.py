"""The public face of the room: a train step over submeshes.

Two single-device functions whose parts are named become a pipelined step:

* `accumulate(accumulator, parameters, replicas, microbatch) -> accumulator` for one microbatch, and
* `update(parameters, optimizer, accumulator, scalars) -> (parameters, optimizer, accumulator, metrics)`, whose
  third result is a fresh accumulator.

Parameters that a second stage needs (tied weights) are *replicas* there: the stage differentiates its own copy,
the accumulator holds a gradient for each, `update` adds them once a step, and the pipeline copies the new values
over. Nothing of their size moves per microbatch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_titan.mpmd.compile import compile_fragments, compile_gather, sharding_of
from jax_titan.mpmd.executor import Executor, Roles
from jax_titan.mpmd.partition import partition, spec_of
from jax_titan.mpmd.program import Program, Spec, divisible
from jax_titan.mpmd.schedule import Schedule, Task, forward_only
from jax_titan.mpmd.topology import Topology


@dataclasses.dataclass(frozen=True)
class Placed:
    """A pytree of shapes and where its leaves live.

    Attributes:
        tree: `jax.ShapeDtypeStruct` leaves.
        meshes: a tree prefix of submesh names.
    """

    tree: Any
    meshes: Any


@dataclasses.dataclass(frozen=True)
class Replica:
    """Parameters that a second stage reads too.

    Attributes:
        select: picks them from the parameters.
        mesh: the submesh of the copy.
    """

    select: Callable[[Any], Any]
    mesh: str


@dataclasses.dataclass(frozen=True)
class BuildReport:
    """What making the pipeline cost: seconds by phase, and the counts that must not grow with microbatches."""

    lower_seconds: float
    partition_seconds: float
    compile_seconds: float
    fragments: int
    transfers_per_microbatch: int
    transfers_per_step: int


class Pipeline:
    """A train step, cut by stage and ready to run.

    Args:
        accumulate, update: as in the module's docstring.
        topology: submeshes and the names assigned to them.
        schedule: the order of tasks, for a fixed number of microbatches.
        accumulator, parameters, optimizer, scalars, microbatch: shapes and places of the functions' arguments.
        replicas: by name, the parameters that live on a second stage too; `accumulate` gets them under the name.
        metrics_mesh: tree prefix of the submeshes of `update`'s last result.

    Raises:
        PartitionError, ExecutorError: what the functions do cannot be cut or run this way.
    """

    def __init__(
        self,
        accumulate: Callable[..., Any],
        update: Callable[..., Any],
        topology: Topology,
        schedule: Schedule,
        *,
        accumulator: Placed,
        parameters: Placed,
        optimizer: Placed,
        scalars: Placed,
        microbatch: Placed,
        metrics_mesh: Any,
        replicas: Mapping[str, Replica] | None = None,
    ):
        self.topology = topology
        self.schedule = schedule
        self._replicas = dict(replicas or {})
        self._parameters = parameters
        copies = self._replica_shapes(parameters)
        cut = partition(
            accumulate,
            (accumulator.tree, parameters.tree, copies.tree, microbatch.tree),
            topology,
            argument_meshes=(accumulator.meshes, parameters.meshes, copies.meshes, microbatch.meshes),
            result_meshes=accumulator.meshes,
            result_specs=_specs(accumulator.tree),
            donate=(0,),
            split_backward=any(task.kind == "W" for tasks in schedule.order for task in tasks),
            name="accumulate",
        )
        updated = partition(
            update,
            (parameters.tree, optimizer.tree, accumulator.tree, scalars.tree),
            topology,
            argument_meshes=(parameters.meshes, optimizer.meshes, accumulator.meshes, scalars.meshes),
            result_meshes=(parameters.meshes, optimizer.meshes, accumulator.meshes, metrics_mesh),
            result_specs=_specs((parameters.tree, optimizer.tree, accumulator.tree)),
            donate=(0, 1, 2),
            scheduled=False,
            name="update",
        )
        self.accumulate_program: Program = cut.program
        self.update_program: Program = updated.program
        start = time.perf_counter()
        fragments = [*cut.program.fragments, *updated.program.fragments]
        functions = compile_fragments(fragments, topology.meshes)
        compiled_at = time.perf_counter()
        counts = {
            "carried": len(jax.tree.leaves(accumulator.tree)),
            "parameters": len(jax.tree.leaves(parameters.tree)),
            "copies": len(jax.tree.leaves(copies.tree)),
            "microbatch": len(jax.tree.leaves(microbatch.tree)),
            "extra": len(jax.tree.leaves((optimizer.tree, scalars.tree))),
            "optimizer": len(jax.tree.leaves(optimizer.tree)),
        }
        self._roles = Roles(counts["carried"], counts["parameters"] + counts["copies"], counts["microbatch"])
        split = len(cut.program.fragments)
        self._executor = Executor(
            cut.program,
            self._roles,
            schedule,
            functions[:split],
            topology.meshes,
            update=updated.program,
            update_functions=functions[split:],
            update_reads=[
                *(("shared", i) for i in range(counts["parameters"])),
                *(("extra", i) for i in range(counts["optimizer"])),
                *(("carried", i) for i in range(counts["carried"])),
                *(("extra", i) for i in range(counts["optimizer"], counts["extra"])),
            ],
        )
        self._refresh = self._replica_sources(updated.program)
        self._accumulate_only = Executor(cut.program, self._roles, schedule, functions[:split], topology.meshes)
        self._out_tree = updated.out_tree
        self._copies_tree = jax.tree.structure(copies.tree)
        self._accumulator_tree = jax.tree.structure(accumulator.tree)
        self._scalar_shardings = [
            sharding_of(updated.program.values[i], topology.meshes)
            for i in updated.program.inputs[
                len(updated.program.inputs) - (counts["extra"] - counts["optimizer"]) :
            ]
        ]
        self.report = BuildReport(
            lower_seconds=cut.lower_seconds + updated.lower_seconds,
            partition_seconds=cut.partition_seconds + updated.partition_seconds,
            compile_seconds=compiled_at - start,
            fragments=len(fragments),
            transfers_per_microbatch=len(list(cut.program.transfers())),
            transfers_per_step=self._executor.transfers + len(self._refresh),
        )

    def _replica_shapes(self, parameters: Placed) -> Placed:
        return Placed(
            {name: replica.select(parameters.tree) for name, replica in self._replicas.items()},
            {name: replica.mesh for name, replica in self._replicas.items()},
        )

    def _replica_sources(
        self, update: Program
    ) -> list[tuple[int, Callable[..., Any] | None, jax.sharding.NamedSharding]]:
        """Which leaves of the parameters are copied, what gathers them first, and where they go."""
        leaves, tree = jax.tree.flatten(self._parameters.tree)
        positions = jax.tree.unflatten(tree, range(len(leaves)))
        result = []
        for name in sorted(self._replicas):  # the order in which JAX flattens a dictionary
            replica = self._replicas[name]
            for position in jax.tree.leaves(replica.select(positions)):
                value = update.values[update.outputs[position]]
                sizes = dict(self.topology.axes()[replica.mesh])
                spec = divisible(value.spec, value.shape, sizes)
                copy = dataclasses.replace(value, mesh=replica.mesh, spec=spec)
                gather = compile_gather(value, copy, self.topology.meshes)
                result.append((position, gather, sharding_of(copy, self.topology.meshes)))
        return result

    def replicate(self, parameters: Any) -> dict[str, Any]:
        """Fresh replicas of parameters, each leaf copied to the stage that reads it."""
        leaves = jax.tree.leaves(parameters)
        copies = []
        for position, gather, sharding in self._refresh:
            leaf = leaves[position]
            copies.append(jax.device_put(gather(leaf)[0] if gather else leaf, sharding))
        return jax.tree.unflatten(self._copies_tree, copies)

    def step(
        self,
        parameters: Any,
        replicas: Any,
        optimizer: Any,
        accumulator: Any,
        scalars: Any,
        microbatches: Sequence[Any],
        after_task: Callable[[Task, list[Any]], None] | None = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Dispatch one step; parameters, optimizer, accumulator and replicas given in are used up.

        Args:
            scalars, microbatches: on the host; microbatches has one pytree for each microbatch.

        Returns:
            parameters, replicas, optimizer, accumulator, metrics.
        """
        executor = self._executor
        results = executor.run(
            [*jax.tree.leaves(parameters), *jax.tree.leaves(replicas)],
            jax.tree.leaves(accumulator),
            [*jax.tree.leaves(optimizer), *jax.device_put(jax.tree.leaves(scalars), self._scalar_shardings)],
            executor.place([jax.tree.leaves(microbatch) for microbatch in microbatches]),
            after_task,
        )
        parameters, optimizer, accumulator, metrics = jax.tree.unflatten(self._out_tree, results)
        for old in jax.tree.leaves(replicas):
            old.delete()  # before the new ones are made, whoever still holds them
        return parameters, self.replicate(parameters), optimizer, accumulator, metrics

    def accumulate(self, parameters: Any, replicas: Any, accumulator: Any, microbatches: Sequence[Any]) -> Any:
        """Only the accumulation, without the update: uses up the accumulator given in, returns the new one."""
        executor = self._accumulate_only
        results = executor.run(
            [*jax.tree.leaves(parameters), *jax.tree.leaves(replicas)],
            jax.tree.leaves(accumulator),
            [],
            executor.place([jax.tree.leaves(microbatch) for microbatch in microbatches]),
        )
        return jax.tree.unflatten(self._accumulator_tree, results)

    @property
    def executor(self) -> Executor:
        return self._executor


class Evaluation:
    """Only forwards: `evaluate(accumulator, parameters, replicas, microbatch) -> accumulator`, for any number of
    microbatches; places and shapes as in `Pipeline`."""

    def __init__(
        self,
        evaluate: Callable[..., Any],
        pipeline: Pipeline,
        *,
        accumulator: Placed,
        microbatch: Placed,
        microbatches: int,
    ):
        parameters = pipeline._parameters
        copies = pipeline._replica_shapes(parameters)
        topology = pipeline.topology
        cut = partition(
            evaluate,
            (accumulator.tree, parameters.tree, copies.tree, microbatch.tree),
            topology,
            argument_meshes=(accumulator.meshes, parameters.meshes, copies.meshes, microbatch.meshes),
            result_meshes=accumulator.meshes,
            result_specs=_specs(accumulator.tree),
            donate=(0,),
            name="evaluate",
        )
        roles = Roles(
            len(jax.tree.leaves(accumulator.tree)),
            len(jax.tree.leaves((parameters.tree, copies.tree))),
            len(jax.tree.leaves(microbatch.tree)),
        )
        self.program = cut.program
        self._executor = Executor(
            cut.program,
            roles,
            forward_only(topology.stages, microbatches),
            compile_fragments(cut.program.fragments, topology.meshes),
            topology.meshes,
        )
        self._tree = jax.tree.structure(accumulator.tree)
        self._shardings = [sharding_of(cut.program.values[i], topology.meshes) for i in cut.program.outputs]

    def run(self, parameters: Any, replicas: Any, accumulator: Any, microbatches: Sequence[Any]) -> Any:
        """Args: the accumulator and the microbatches on the host, the rest on its submeshes."""
        results = self._executor.run(
            [*jax.tree.leaves(parameters), *jax.tree.leaves(replicas)],
            jax.device_put(jax.tree.leaves(accumulator), self._shardings),
            [],
            self._executor.place([jax.tree.leaves(microbatch) for microbatch in microbatches]),
        )
        return jax.tree.unflatten(self._tree, results)


def _specs(tree: Any) -> list[Spec | None]:
    return [spec_of(leaf) for leaf in jax.tree.leaves(tree)]
