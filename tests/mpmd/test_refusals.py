"""What a pipeline cannot run is refused in the user's names: no wrong number, no crash of the process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_titan.mpmd import schedule as schedules
from jax_titan.mpmd.annotate import stage
from jax_titan.mpmd.compile import compile_fragments
from jax_titan.mpmd.executor import Executor, ExecutorError, Roles
from jax_titan.mpmd.partition import partition
from jax_titan.mpmd.reader import PartitionError
from jax_titan.mpmd.topology import Topology

ROW = jax.ShapeDtypeStruct((4,), "float32")
SCALAR = jax.ShapeDtypeStruct((), "float32")


def cut(function, accumulator, places, batch=ROW, topology=None, **settings):
    """Partition `function(acc, w, x)` over two stages, with a weight a stage."""
    topology = topology or Topology.one_device_a_stage(jax.devices()[:2])
    return partition(
        function,
        (accumulator, [ROW, ROW], batch),
        topology,
        argument_meshes=(places, ["mesh0", "mesh1"], "mesh0"),
        result_meshes=places,
        donate=(0,),
        name="accumulate",
        **settings,
    ).program


def execute(program, carried, topology=None, schedule=None):
    topology = topology or Topology.one_device_a_stage(jax.devices()[:2])
    functions = [lambda *_: None] * len(program.fragments)
    schedule = schedule or schedules.one_f_one_b(2, 4)
    return Executor(program, Roles(carried, 2, 1), schedule, functions, topology.meshes)


def loss_of(w, x):
    h = stage("stage0")(lambda w, x: jnp.tanh(w * x))(w[0], x)
    return stage("stage1")(lambda w, h: jnp.sum((w * h) ** 2))(w[1], h)


def test_a_counter_read_by_the_forward_and_written_by_another_task_is_refused():
    def accumulate(acc, w, x):
        def loss(w):
            h = stage("stage0")(lambda w, x, n: jnp.tanh(w * x) * n)(w[0], x, acc["n"])
            return stage("stage1")(lambda w, h: jnp.sum((w * h) ** 2))(w[1], h)

        value, gradients = jax.value_and_grad(loss)(w)
        return {
            "loss": acc["loss"] + value,
            "gradients": jax.tree.map(jnp.add, acc["gradients"], gradients),
            "n": acc["n"] + 1,
        }

    accumulator = {"loss": SCALAR, "gradients": [ROW, ROW], "n": SCALAR}
    places = {"loss": "mesh1", "gradients": ["mesh0", "mesh1"], "n": "mesh0"}
    with pytest.raises((ExecutorError, PartitionError), match=r"\['n'\]"):
        execute(cut(accumulate, accumulator, places), 4)


def test_an_average_that_the_backward_needs_again_is_refused():
    def accumulate(acc, w, x):
        def loss(w):
            def first(w, x, mean):
                mean = 0.9 * mean + 0.1 * jnp.abs(x)
                return jnp.tanh(w * x * mean), mean

            h, mean = stage("stage0")(first)(w[0], x, acc["mean"])
            return stage("stage1")(lambda w, h: jnp.sum((w * h) ** 2))(w[1], h), mean

        (value, mean), gradients = jax.value_and_grad(loss, has_aux=True)(w)
        gradients = jax.tree.map(jnp.add, acc["gradients"], gradients)
        return {"loss": acc["loss"] + value, "gradients": gradients, "mean": mean}

    accumulator = {"loss": SCALAR, "gradients": [ROW, ROW], "mean": ROW}
    places = {"loss": "mesh1", "gradients": ["mesh0", "mesh1"], "mean": "mesh0"}
    with pytest.raises(ExecutorError, match=r"acc\['mean'\] is used by B of stage 0 and F of stage 0"):
        execute(cut(accumulate, accumulator, places), 4)


def test_a_stage_without_gradient_is_named():
    def accumulate(acc, w, x):
        h = jax.lax.stop_gradient(stage("stage0")(lambda w, x: jnp.tanh(w * x))(w[0], x))
        value, gradient = jax.value_and_grad(lambda v: stage("stage1")(lambda v, h: jnp.sum((v * h) ** 2))(v, h))(
            w[1]
        )
        return acc[0] + value, acc[1] + gradient

    program = cut(accumulate, (SCALAR, ROW), ("mesh1", "mesh1"))
    with pytest.raises(ExecutorError, match=r"no fragment for B\(stage 0, .*nothing in that stage has a gradient"):
        execute(program, 2)


def test_a_result_that_no_part_computes_is_named():
    def accumulate(acc, w, x):
        return acc[1], acc[0] + loss_of(w, x)

    with pytest.raises(
        PartitionError, match=r"accumulate: result\[0\] on mesh1 is computed outside every named part"
    ):
        cut(accumulate, (SCALAR, SCALAR), "mesh1")


@pytest.mark.parametrize("kind", ["print", "callback", "pure"])
def test_callbacks_are_refused_before_they_can_crash(kind):
    def noisy(w, h):
        if kind == "print":
            jax.debug.print("h {h}", h=h)
        elif kind == "callback":
            jax.debug.callback(lambda _: None, h)
        else:
            h = jax.pure_callback(lambda y: y, h, h)
        return jnp.sum(w * h)

    def accumulate(acc, w, x):
        h = stage("stage0")(lambda w, x: jnp.tanh(w * x))(w[0], x)
        return acc + stage("stage1")(noisy)(w[1], h)

    with pytest.raises(PartitionError, match="cannot be cut; use no callbacks and prints"):
        cut(accumulate, SCALAR, "mesh1")


def test_complex_arrays_between_parts_are_refused_before_they_can_crash():
    def spectrum(acc, w, x):
        h = stage("stage0")(lambda w, x: jnp.fft.fft(w * x))(w[0], x)
        return acc + stage("stage1")(lambda w, h: jnp.sum(w * jnp.abs(h)))(w[1], h)

    with pytest.raises(PartitionError, match=r"a complex array .*complex<f32>"):
        cut(spectrum, SCALAR, "mesh1")

    def residual(acc, w, x):
        def first(w, x):
            return jnp.real(jnp.fft.ifft(jnp.fft.fft(w * x) ** 2))

        return acc + jax.grad(lambda w: jnp.sum(stage("stage0")(first)(w, x)))(w[0])

    with pytest.raises(PartitionError, match="a complex array"):
        cut(residual, ROW, "mesh0")


def test_a_typed_key_is_refused_with_the_way_out():
    def accumulate(acc, w, key):
        return acc + stage("stage0")(lambda w, k: jnp.sum(w * jax.random.uniform(k, (4,))))(w[0], key)

    key = jax.eval_shape(lambda: jax.random.key(0))
    with pytest.raises(PartitionError, match=r"typed PRNG key; pass jax.random.key_data"):
        cut(accumulate, SCALAR, "mesh0", batch=key)


def test_stage_numbers_against_the_flow_of_data_are_refused():
    meshes = Topology.one_device_a_stage(jax.devices()[:2]).meshes
    backwards = Topology(meshes, {"stage0": ("mesh0", 1), "stage1": ("mesh1", 0)})
    program = cut(lambda acc, w, x: acc + loss_of(w, x), SCALAR, "mesh1", topology=backwards)
    with pytest.raises(ExecutorError, match="comes before what it reads"):
        execute(program, 1, backwards, schedules.forward_only(2, 2))


def test_names_that_the_partitioner_could_misread_are_refused():
    meshes = Topology.one_device_a_stage(jax.devices()[:1]).meshes
    for name in ("main", "mesh", "a b", 'a"b', ""):
        with pytest.raises(ValueError, match="submesh"):
            Topology({name: meshes["mesh0"]}, {})
    with pytest.raises(ValueError, match="quotes and backslashes"):
        Topology(meshes, {'a"b': ("mesh0", 0)})
    other = Mesh(np.array(jax.devices()[:1]), ("rows",))
    with pytest.raises(ValueError, match="different axes"):
        Topology({"one": meshes["mesh0"], "two": other}, {})


def test_stages_of_two_devices_keep_their_shardings_and_their_numbers():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    topology = Topology(
        {f"mesh{s}": Mesh(devices[s], ("data",)) for s in range(2)},
        {f"stage{s}": (f"mesh{s}", s) for s in range(2)},
    )
    rows = jax.ShapeDtypeStruct(
        (8, 4), "float32", sharding=NamedSharding(topology.meshes["mesh0"], PartitionSpec("data"))
    )

    def accumulate(acc, w, x):
        value, gradients = jax.value_and_grad(loss_of)(w, x)
        return acc[0] + value, jax.tree.map(jnp.add, acc[1], gradients)

    program = cut(accumulate, (SCALAR, [ROW, ROW]), ("mesh1", ["mesh0", "mesh1"]), batch=rows, topology=topology)
    assert {program.values[t.source].spec for t in program.transfers()} == {("data",)}
    functions = compile_fragments(program.fragments, topology.meshes)
    executor = Executor(program, Roles(3, 2, 1), schedules.one_f_one_b(2, 4), functions, topology.meshes)

    def replicated(value, s):
        return jax.device_put(
            np.asarray(value, "float32"), NamedSharding(topology.meshes[f"mesh{s}"], PartitionSpec())
        )

    w = [np.linspace(0.5, 1, 4), np.linspace(-1, 1, 4)]
    data = [np.random.default_rng(m).normal(size=(8, 4)).astype("float32") for m in range(4)]
    value, *gradients = executor.run(
        [replicated(w[0], 0), replicated(w[1], 1)],
        [replicated(0.0, 1), replicated(np.zeros(4), 0), replicated(np.zeros(4), 1)],
        [],
        executor.place([[x] for x in data]),
    )
    expected = jax.value_and_grad(lambda w: sum(loss_of(w, x) for x in data))([jnp.float32(v) for v in w])
    np.testing.assert_allclose(float(value), float(expected[0]), rtol=1e-5)
    for a, b in zip(gradients, expected[1], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
