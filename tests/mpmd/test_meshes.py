"""Stages of several devices, alike or not: shardings are kept where they fit, numbers are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from mpmd.toy import ROWS, WIDTH, accumulate, microbatches, update, weights

from jax_titan.mpmd import schedule as schedules
from jax_titan.mpmd.partition import PartitionError, partition
from jax_titan.mpmd.pipeline import Pipeline, Placed
from jax_titan.mpmd.topology import Topology

MICROBATCHES = 4


def topology_of(*sizes):
    """Meshes with the axes rows x columns, on consecutive devices."""
    meshes, rest = [], jax.devices()
    for rows, columns in sizes:
        count = rows * columns
        meshes.append(Mesh(np.array(rest[:count]).reshape(rows, columns), ("rows", "columns")))
        rest = rest[count:]
    return Topology.of_stages(meshes)


def placed(tree, topology, spec_of):
    """Shapes of a list with one tree a stage, each leaf split on its own stage's mesh."""
    return [
        jax.tree.map(
            lambda x, mesh=mesh: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec_of(x))),
            part,
        )
        for part, mesh in zip(tree, topology.meshes.values(), strict=True)
    ]


def columns(x):
    return PartitionSpec(*[None] * (x.ndim - 1), "columns")


def rows(x):
    return PartitionSpec("rows")


def pipeline_of(topology):
    stages, names = topology.stages, list(topology.meshes)
    w = placed(weights(stages), topology, columns)
    some = microbatches(1, stages)[0]
    (x,) = placed([some["x"]], topology_of((1, 1)), rows)
    scalar = jax.ShapeDtypeStruct((), "float32")
    return Pipeline(
        accumulate(stages),
        update(stages),
        topology,
        schedules.build("1f1b", stages, MICROBATCHES),
        accumulator=Placed({"loss": scalar, "gradients": w}, {"loss": names[-1], "gradients": names}),
        parameters=Placed(w, names),
        optimizer=Placed({}, {}),
        scalars=Placed([scalar] * stages, names),
        microbatch=Placed({"x": x, "t": placed(some["t"], topology, rows)}, {"x": names[0], "t": names}),
        metrics_mesh=names[-1],
    )


def put(values, shapes):
    return jax.tree.map(lambda v, s: jax.device_put(np.asarray(v), s.sharding), values, shapes)


@pytest.mark.parametrize(
    "sizes",
    [
        [(2, 1), (2, 1)],
        [(1, 2), (1, 2)],
        [(2, 2), (2, 2)],
        [(1, 1), (2, 1), (1, 1)],
        [(1, 1), (1, 2), (1, 1)],
        [(2, 1), (1, 2), (1, 1), (2, 1)],
        [(1, 4), (1, 2)],
    ],
    ids=str,
)
def test_stages_of_any_sizes_give_the_numbers_of_one_device(sizes):
    topology = topology_of(*sizes)
    stages = topology.stages
    pipeline = pipeline_of(topology)
    start, some = weights(stages), microbatches(MICROBATCHES, stages)
    shapes = placed(start, topology, columns)
    last = NamedSharding(topology.meshes[f"mesh{stages - 1}"], PartitionSpec())
    state = put(start, shapes)
    zeros = {
        "loss": jax.device_put(jnp.zeros(()), last),
        "gradients": put(jax.tree.map(jnp.zeros_like, start), shapes),
    }
    expected = start
    for _ in range(2):
        state, _, _, zeros, metrics = pipeline.step(state, {}, {}, zeros, [np.float32(0.05)] * stages, some)
        sums = {"loss": jnp.zeros(()), "gradients": jax.tree.map(jnp.zeros_like, expected)}
        for one in some:
            sums = jax.jit(accumulate(stages))(sums, expected, {}, one)
        expected, _, _, wanted = jax.jit(update(stages))(expected, {}, sums, [np.float32(0.05)] * stages)
        np.testing.assert_allclose(float(metrics["loss"]), float(wanted["loss"]), rtol=1e-5)
    for shape, a, b in zip(
        jax.tree.leaves(shapes), jax.tree.leaves(state), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)
        assert a.sharding.is_equivalent_to(shape.sharding, a.ndim)


def test_what_is_split_alike_is_copied_and_what_is_not_is_gathered_first():
    def calls_of_tasks(*sizes):
        instructions = pipeline_of(topology_of(*sizes)).executor.instructions
        return sum(i.call is not None and i.task is not None for i in instructions)

    tasks = 2 * 2 * MICROBATCHES
    assert calls_of_tasks((2, 1), (2, 1)) == tasks
    assert calls_of_tasks((1, 1), (1, 1)) == tasks
    # Of the two arrays that cross, only the gradient comes from the stage that splits it.
    assert calls_of_tasks((1, 1), (2, 1)) == tasks + MICROBATCHES


def test_gathering_leaves_no_more_activations_alive():
    assert pipeline_of(topology_of((2, 1), (1, 2), (1, 1))).executor.live_activations() == (3, 2, 1)


def test_an_axis_that_does_not_divide_a_dimension_leaves_it_whole():
    topology = topology_of((1, 3), (1, 3))
    pipeline = pipeline_of(topology)
    assert ROWS * WIDTH % 3
    for value in pipeline.accumulate_program.values:
        assert "columns" not in str(value.spec)


def test_shard_map_in_stages_of_different_sizes_is_refused():
    topology = topology_of((1, 1), (2, 1))
    from jax_titan.mpmd.annotate import stage

    def function(x):
        mesh = jax.sharding.get_abstract_mesh()
        spec = PartitionSpec("rows")
        part = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec)
        return stage("stage1")(lambda x: x + 1)(stage("stage0")(part)(x))

    with pytest.raises(PartitionError, match="shard_map needs submeshes of equal size"):
        partition(
            function,
            (jax.ShapeDtypeStruct((4,), "float32"),),
            topology,
            argument_meshes=("mesh0",),
            result_meshes="mesh1",
        )
