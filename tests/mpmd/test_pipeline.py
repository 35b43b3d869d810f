"""A pipelined step is the single-device step, keeps no more than its schedule promises, and wastes no transfer."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpmd.toy import ROWS, WIDTH, accumulate, microbatches, shapes, update, weights

from jax_titan.mpmd import schedule as schedules
from jax_titan.mpmd.annotate import stage
from jax_titan.mpmd.executor import Executor, ExecutorError, Roles
from jax_titan.mpmd.partition import partition
from jax_titan.mpmd.pipeline import Pipeline, Placed, Replica
from jax_titan.mpmd.program import Transfer
from jax_titan.mpmd.topology import Topology


def build(stages, name, count):
    topology = Topology.one_device_a_stage(jax.devices()[:stages])
    meshes = list(topology.meshes)
    w = shapes(weights(stages))
    places = {"loss": meshes[-1], "gradients": meshes}
    return Pipeline(
        accumulate(stages),
        update(stages),
        topology,
        schedules.build(name, stages, count),
        accumulator=Placed({"loss": jax.ShapeDtypeStruct((), "float32"), "gradients": w}, places),
        parameters=Placed(w, meshes),
        optimizer=Placed([], meshes[0]),
        scalars=Placed([jax.ShapeDtypeStruct((), "float32")] * stages, meshes),
        microbatch=Placed(shapes(microbatches(1, stages)[0]), {"x": meshes[0], "t": meshes}),
        metrics_mesh=meshes[-1],
    )


def placed(stages):
    devices = jax.devices()[:stages]
    # Through NumPy: a copy to the device where an array lives already would be the same memory.
    parameters = [
        jax.device_put(jax.tree.map(np.asarray, w), d) for w, d in zip(weights(stages), devices, strict=True)
    ]
    gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.device), parameters)
    return parameters, {"loss": jnp.zeros((), device=devices[-1]), "gradients": gradients}


def host(count, stages):
    return jax.tree.map(np.asarray, microbatches(count, stages))


def reference(stages, count, steps=2, rate=0.01):
    """The same accumulation, one plain jit on one device."""
    step = jax.jit(accumulate(stages))
    w, values = weights(stages), []
    for _ in range(steps):
        acc = {"loss": jnp.zeros(()), "gradients": jax.tree.map(jnp.zeros_like, w)}
        for microbatch in microbatches(count, stages):
            acc = step(acc, w, {}, microbatch)
        w = jax.jit(lambda w, g: jax.tree.map(lambda a, b: a - rate * b, w, g))(w, acc["gradients"])
        values.append(float(acc["loss"]))
    return w, values


@pytest.mark.parametrize("name", schedules.SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_pipelined_step_equals_the_plain_one(stages, name):
    for count in (1, 2, 3, 8):
        pipeline = build(stages, name, count)
        parameters, acc = placed(stages)
        found = []
        for _ in range(2):
            parameters, _, _, acc, metrics = pipeline.step(
                parameters, {}, [], acc, [np.float32(0.01)] * stages, host(count, stages)
            )
            found.append(float(metrics["loss"]))
        expected, values = reference(stages, count)
        np.testing.assert_allclose(found, values, rtol=2e-7)
        for a, b in zip(jax.tree.leaves(parameters), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=1e-7)


def test_parameters_stay_on_their_own_device():
    pipeline = build(3, "1f1b", 2)
    parameters, acc = placed(3)
    parameters, *_ = pipeline.step(parameters, {}, [], acc, [np.float32(0.1)] * 3, host(2, 3))
    for s, tree in enumerate(parameters):
        assert {leaf.device for leaf in jax.tree.leaves(tree)} == {jax.devices()[s]}


def test_the_programs_do_not_depend_on_the_number_of_microbatches_or_the_schedule():
    first = build(3, "1f1b", 4)
    for other in (build(3, "1f1b", 64), build(3, "gpipe", 5)):
        assert other.accumulate_program == first.accumulate_program
        assert other.update_program == first.update_program
        assert other.report.fragments == first.report.fragments


@pytest.mark.parametrize("count", [1, 2, 5, 8, 16])
def test_activations_alive_are_those_of_the_schedule_by_the_slots(count):
    assert build(4, "1f1b", count).executor.live_activations() == tuple(min(count, 4 - s) for s in range(4))
    assert build(4, "gpipe", count).executor.live_activations() == (count,) * 4


def _bytes_by_device():
    held = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        (device,) = array.devices()  # one device a stage; looking at shards would make arrays of its own
        held[device] += array.nbytes
    return held


def _peak_bytes(pipeline, stages, count):
    """Most bytes on each device beyond those before the step, looked at after each task has ended."""
    parameters, acc = placed(stages)
    arguments = host(count, stages)
    pipeline.step(parameters, {}, [], acc, [np.float32(0.1)] * stages, arguments)
    parameters, acc = placed(stages)
    scalars = [np.float32(0.1)] * stages
    gc.collect()  # arrays that only a cycle of earlier tests holds would be freed in the middle of this one
    before = _bytes_by_device()
    peaks = dict.fromkeys(jax.devices(), 0)

    def look(task, table):
        jax.block_until_ready([x for x in table if x is not None])
        held = _bytes_by_device()
        for slots in pipeline.executor._microbatches:  # the batch itself is no activation
            for array in table[slots.start : slots.stop]:
                if array is not None:
                    held[next(iter(array.devices()))] -= array.nbytes
        for device in held:
            peaks[device] = max(peaks[device], held[device] - before[device])

    pipeline.step(parameters, {}, [], acc, scalars, arguments, after_task=look)
    return [peaks[device] for device in jax.devices()[:stages]]


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_activations_alive_are_those_of_the_schedule_by_the_bytes_of_live_arrays(name):
    stages, row = 4, ROWS * WIDTH * 4
    for count in (2, 8, 12):
        pipeline = build(stages, name, count)
        program = pipeline.accumulate_program
        made_before = set(program.inputs)
        kept = dict.fromkeys(range(stages), 0)
        for operation in program.operations:  # what a forward leaves on its device for the backward
            if isinstance(operation, Transfer):
                continue
            fragment = program.fragments[operation.fragment]
            if fragment.kind == "F":
                made_before |= set(operation.outputs)
                made_before |= {t.target for t in program.transfers() if t.source in operation.outputs}
            else:
                left = [v for v in operation.inputs if v in made_before and v not in program.inputs]
                kept[fragment.stage] = sum(program.values[v].global_bytes for v in left)
        peaks = _peak_bytes(pipeline, stages, count)
        for s, promise in enumerate(pipeline.schedule.promise):
            low = promise * kept[s]
            high = low + 3 * row  # an input that waits, what is being sent, one gradient
            assert low <= peaks[s] <= high, (name, count, s, promise, low, peaks[s], high)


def test_a_step_moves_two_arrays_a_boundary_and_microbatch_and_nothing_else():
    for count in (1, 8):
        assert build(4, "1f1b", count).executor.transfers == count * 2 * 3


def test_a_second_step_compiles_nothing():
    pipeline = build(2, "1f1b", 4)
    parameters, acc = placed(2)
    compiled = []

    def listener(event, *_, **__):
        if "compile" in event:
            compiled.append(event)

    state = pipeline.step(parameters, {}, [], acc, [np.float32(0.1)] * 2, host(4, 2))
    jax.monitoring.register_event_duration_secs_listener(listener)
    pipeline.step(state[0], {}, [], state[3], [np.float32(0.1)] * 2, host(4, 2))
    assert not compiled


def test_parameters_that_two_stages_read_are_replicas():
    """Both stages use one matrix: gradients add up, and only the update moves anything of its size."""
    topology = Topology.one_device_a_stage(jax.devices()[:2])
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
    scalar = jax.ShapeDtypeStruct((), "float32")

    def plain(w, copy, x):
        y = stage("stage0")(lambda w, x: jnp.tanh(x @ w))(w, x)
        return stage("stage1")(lambda w, y: jnp.sum((y @ w.T) ** 2))(copy, y)

    def accumulate(acc, parameters, replicas, x):
        value, (own, of_copy) = jax.value_and_grad(plain, argnums=(0, 1))(parameters["w"], replicas["w2"], x)
        return jax.tree.map(jnp.add, acc, {"loss": value, "own": own, "copy": of_copy})

    def update(parameters, optimizer, acc, scalars):
        def apply(w, own, of_copy):
            return w - 0.01 * (own + of_copy), jnp.zeros_like(own)

        w, zero = stage("stage0")(apply)(parameters["w"], acc["own"], acc["copy"])
        value, zeros, zero_loss = stage("stage1")(lambda x, g: (x, jnp.zeros_like(g), jnp.zeros_like(x)))(
            acc["loss"], acc["copy"]
        )
        return {"w": w}, optimizer, {"loss": zero_loss, "own": zero, "copy": zeros}, value

    places = {"loss": "mesh1", "own": "mesh0", "copy": "mesh1"}
    pipeline = Pipeline(
        accumulate,
        update,
        topology,
        schedules.build("1f1b", 2, 4),
        accumulator=Placed({"loss": scalar, "own": matrix, "copy": matrix}, places),
        parameters=Placed({"w": matrix}, "mesh0"),
        optimizer=Placed([], "mesh0"),
        scalars=Placed([], "mesh0"),
        microbatch=Placed(jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"), "mesh0"),
        metrics_mesh="mesh1",
        replicas={"w2": Replica(lambda parameters: parameters["w"], "mesh1")},
    )
    rows = [np.asarray(m["x"]) for m in microbatches(4, 1)]
    start = np.asarray(jax.random.normal(jax.random.key(3), (WIDTH, WIDTH))) * 0.3
    parameters = {"w": jax.device_put(start, jax.devices()[0])}
    replicas = pipeline.replicate(parameters)
    acc = {
        "loss": jnp.zeros((), device=jax.devices()[1]),
        "own": jnp.zeros((WIDTH, WIDTH), device=jax.devices()[0]),
        "copy": jnp.zeros((WIDTH, WIDTH), device=jax.devices()[1]),
    }
    optimizer = []
    w = jnp.asarray(start)
    for _ in range(3):
        parameters, replicas, optimizer, acc, value = pipeline.step(parameters, replicas, optimizer, acc, [], rows)
        total, gradient = jax.value_and_grad(lambda w: sum(plain(w, w, x) for x in rows))(w)
        w = w - 0.01 * gradient
        assert float(value) == pytest.approx(float(total), rel=1e-6)
        np.testing.assert_allclose(np.asarray(parameters["w"]), np.asarray(w), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(replicas["w2"]), np.asarray(parameters["w"]))
        assert replicas["w2"].device == jax.devices()[1]
    big = WIDTH * WIDTH * 4
    moved = [
        v
        for v in pipeline.accumulate_program.transfers()
        if pipeline.accumulate_program.values[v.source].global_bytes == big
    ]
    assert moved == []
    assert pipeline.report.transfers_per_step == 4 * 2 + 2


def test_a_schedule_for_another_number_of_stages_is_refused():
    pipeline = build(2, "1f1b", 2)
    with pytest.raises(ExecutorError, match="3 stages for a program of 2"):
        Executor(
            pipeline.accumulate_program,
            Roles(5, 4, 3),
            schedules.build("1f1b", 3, 2),
            [lambda *_: None] * 4,
            pipeline.topology.meshes,
        )


def test_a_shared_argument_read_on_two_stages_is_refused_with_the_way_out():
    topology = Topology.one_device_a_stage(jax.devices()[:2])
    row = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")

    def reads_twice(acc, weights, replicas, microbatch):
        x = stage("stage0")(lambda x, t: x + t)(microbatch["x"], microbatch["t"])
        value = stage("stage1")(lambda x, t: jnp.sum(x * t))(x, microbatch["t"])
        return acc + value

    cut = partition(
        reads_twice,
        (jax.ShapeDtypeStruct((), "float32"), [], {}, {"x": row, "t": row}),
        topology,
        argument_meshes=("mesh1", [], {}, "mesh0"),
        result_meshes="mesh1",
        donate=(0,),
    )
    forwards = schedules.forward_only(2, 2)
    with pytest.raises(ExecutorError, match="pass a copy for each stage"):
        Executor(cut.program, Roles(1, 0, 2), forwards, [lambda *_: None] * 2, topology.meshes)


def test_accumulators_that_change_places_or_coincide_are_refused():
    """No function is cut into such a program today; were one to be, its numbers would be wrong in silence."""
    pipeline = build(2, "1f1b", 2)
    program, roles = pipeline.accumulate_program, Roles(5, 4, 3)
    functions = [lambda *_: None] * 4
    for outputs, message in (
        ((program.inputs[1], *program.outputs[1:]), "is accumulator.* unchanged"),
        ((program.outputs[1], *program.outputs[1:]), "are one array"),
    ):
        changed = dataclasses.replace(program, outputs=outputs)
        with pytest.raises(ExecutorError, match=message):
            Executor(changed, roles, pipeline.schedule, functions, pipeline.topology.meshes)


def test_memory_that_is_read_after_it_was_given_away_is_refused():
    pipeline = build(2, "1f1b", 2)
    program = pipeline.accumulate_program
    first = program.fragments[0]
    # The first forward overwrites the parameters that every other microbatch reads.
    broken = dataclasses.replace(first, donated=tuple(range(len(first.inputs))))
    changed = dataclasses.replace(program, fragments=(broken, *program.fragments[1:]))
    functions = [lambda *_: None] * 4
    with pytest.raises(ExecutorError, match=r"F\(stage 0, microbatch [01]\) overwrites"):
        Executor(changed, Roles(5, 4, 3), pipeline.schedule, functions, pipeline.topology.meshes)
