"""A checkpoint gives back every bit, on the same cut or another, and only whole ones count."""

import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp
from trainer.runs import BATCH, batch, demo_model, demo_optimizer, make_layout

from jax_titan.trainer.checkpoint import Checkpoints
from jax_titan.trainer.errors import CheckpointError

MB = 2**20
FACTS = {"data_digest": "abc"}

# A small state with everything that one may hold: matrices of more than a tile and of less, shapes that nothing
# divides, scalars, and two formats.
SHAPES = {
    "embed": {"table": ((1056, 1024), jnp.float32)},
    "layers.0": {"wide": ((8, 24), jnp.float32), "norm": ((24,), jnp.float32)},
    "layers.1": {"wide": ((8, 24), jnp.bfloat16), "norm": ((24,), jnp.float32), "odd": ((3, 5), jnp.float32)},
    "head": {"table": ((16, 40), jnp.float32)},
}


def random_like(key, shape, dtype):
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def state_on_host():
    """Parameters and AdamW's state, with a mean in bfloat16 and weights that do not decay, all of it random."""
    rule = optax.adamw(1e-3, mu_dtype=jnp.bfloat16, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree))
    keys = iter(jax.random.split(jax.random.key(0), 100))
    params = {
        unit: {name: random_like(next(keys), *spec) for name, spec in leaves.items()}
        for unit, leaves in SHAPES.items()
    }

    def filled(leaf):
        return jnp.full_like(leaf, 7) if leaf.ndim == 0 else random_like(next(keys), leaf.shape, leaf.dtype)

    optimizer = {unit: jax.tree.map(filled, rule.init(tree)) for unit, tree in params.items()}
    return jax.tree.map(np.asarray, {"params": params, "optimizer": optimizer})


def stages(*devices):
    """The units in turn on single devices."""
    homes = [SingleDeviceSharding(jax.devices()[d]) for d in devices]
    return lambda unit, shape: homes[list(SHAPES).index(unit) * len(homes) // len(SHAPES)]


def pairs(spec):
    """Two stages of two devices."""
    meshes = [Mesh(np.array(jax.devices()[i : i + 2]), "x") for i in (2, 6)]
    return lambda unit, shape: NamedSharding(meshes[list(SHAPES).index(unit) // 2], fitting(spec, shape, {"x": 2}))


def spmd(count, names, sizes, spec):
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(sizes), names)
    return lambda unit, shape: NamedSharding(mesh, fitting(spec, shape, dict(mesh.shape)))


def fitting(spec, shape, sizes):
    """What of a spec divides a shape."""
    kept = (axis if axis and n % sizes[axis] == 0 else None for axis, n in zip(spec, shape, strict=False))
    return PartitionSpec(*kept)


PLACEMENTS = {
    "4 stages": stages(0, 1, 2, 3),
    "2 stages": stages(5, 4),
    "pairs, fsdp": pairs(("x",)),
    "pairs, tensor": pairs((None, "x")),
    "pairs, data": pairs(()),
    "spmd 1": spmd(1, ("x",), (1,), ()),
    "spmd 2": spmd(2, ("x",), (2,), (None, "x")),
    "spmd 4": spmd(4, ("x", "y"), (2, 2), ("y", "x")),
    "spmd 8": spmd(8, ("x", "y"), (4, 2), ("x", "y")),
}


def described(state, placement):
    """The state as descriptions with shardings."""

    def one(unit, tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement(unit, x.shape)), tree
        )

    return {kind: {unit: one(unit, tree) for unit, tree in units.items()} for kind, units in state.items()}


def placed(state, placement):
    return jax.tree.map(lambda x, wanted: jax.device_put(x, wanted.sharding), state, described(state, placement))


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def state():
    return state_on_host()


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    yield checkpoints
    checkpoints.close()


def small(value=1.0):
    """Arguments of `save` for a state of one array."""
    return {"u": {"w": jnp.full((8, 4), value)}}, {"u": {"mu": jnp.full((8, 4), value)}}, FACTS


HOME = SingleDeviceSharding(jax.devices()[0])


def small_params(shape=(8, 4), dtype=jnp.float32):
    return {"u": {"w": jax.ShapeDtypeStruct(shape, dtype, sharding=HOME)}}


# A state and its places


def trips():
    """From one layout onto all others, and from each of those back and onto the next."""
    names = list(PLACEMENTS)
    back = [(name, [names[0], names[(index + 1) % len(names)]]) for index, name in enumerate(names)]
    return [(names[0], names), *back[1:]]


@pytest.mark.parametrize(("before", "afters"), trips(), ids=list(PLACEMENTS))
def test_a_state_comes_back_bit_for_bit_on_other_layouts(checkpoints, state, before, afters):
    arrays = placed(state, PLACEMENTS[before])
    checkpoints.save(1, arrays["params"], arrays["optimizer"], FACTS)
    checkpoints.finished(wait=True)
    for after in afters:
        wanted = described(state, PLACEMENTS[after])
        params, optimizer = checkpoints.restore(1, wanted)
        found = {"params": params, "optimizer": optimizer}
        assert_same_bits(found, state)
        homes = [[leaf.sharding for leaf in jax.tree.leaves(tree)] for tree in (found, wanted)]
        assert homes[0] == homes[1]
        assert_same_bits(checkpoints.restore_params(1, wanted["params"]), state["params"])


@functools.cache
def layout_of(stages):
    small = {"layers": 3, "dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 48, "vocab_size": 61}
    model = demo_model(True, "float32", **small, sequence_length=32)
    return make_layout(model, demo_optimizer(), stages, "1f1b", 2, (BATCH, 32))


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 0), (0, 3)])
def test_training_goes_on_from_a_checkpoint_on_the_same_cut_or_another(checkpoints, before, after):
    layout, other = layout_of(before), layout_of(after)
    trained = layout.init(3)
    for step in range(2):
        trained, _ = layout.step(trained, batch(step, 61, 32))
    params, optimizer = layout.to_save(trained)
    before_bits = jax.tree.map(np.array, (params, optimizer))
    checkpoints.save(2, params, optimizer, FACTS)
    found = checkpoints.restore(checkpoints.finished(wait=True)[0].step, other.state_shardings())
    assert_same_bits(found, before_bits)
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(other.init(0).params), strict=True):
        assert a.devices() == b.devices()
    # and it trains on: the replica of a tied table is made anew from what was restored
    some = batch(9, 61, 32)
    _, here = layout.step(trained, some)
    _, there = other.step(other.adopt(*found), some)
    assert float(here["loss"]) == pytest.approx(float(there["loss"]), rel=1e-5)


def test_a_checkpoint_of_the_synchronous_checkpointer_is_still_read(tmp_path, state):
    """Written as the first version did: one array a chunk, by Orbax's own manager."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    arrays = placed(state, PLACEMENTS["4 stages"])
    with ocp.training.Checkpointer(str(tmp_path / "c"), context=context) as writer:
        writer.save_checkpointables(3, {"state": arrays}, custom_metadata=FACTS, overwrite=True)
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert (checkpoints.latest_step, checkpoints.facts(3)) == (3, FACTS)
    params, optimizer = checkpoints.restore(3, described(state, PLACEMENTS["spmd 8"]))
    assert_same_bits({"params": params, "optimizer": optimizer}, state)


def test_parameters_are_keyed_by_unit_and_not_compressed(checkpoints):
    zeros = {"layers.0": {"w": jnp.zeros((512, 512))}, "head": {"w": jnp.zeros((512, 512))}}
    checkpoints.save(1, zeros, zeros, FACTS)
    (saved,) = checkpoints.finished(wait=True)
    metadata = json.loads((saved.path / "state" / "_METADATA").read_text())
    assert {eval(key)[1] for key in metadata["tree_metadata"]} == set(zeros)
    assert saved.bytes >= 4 * MB


def test_shapes_and_facts_are_known_without_the_arrays(checkpoints, state):
    arrays = placed(state, PLACEMENTS["pairs, fsdp"])
    checkpoints.save(1, arrays["params"], arrays["optimizer"], FACTS)
    checkpoints.finished(wait=True)
    expected = {
        unit: {name: jax.ShapeDtypeStruct(*spec) for name, spec in leaves.items()}
        for unit, leaves in SHAPES.items()
    }
    start = bytes_read()
    assert checkpoints.shapes(1) == expected
    assert checkpoints.facts(1) == FACTS
    assert bytes_read() - start < 1 * MB < sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_restoring_parameters_leaves_the_optimizer_state_unread(checkpoints):
    params = {"u": {"w": jnp.ones((1024, 1024))}}
    checkpoints.save(1, params, {"u": {"mu": params["u"], "nu": params["u"]}}, FACTS)
    checkpoints.finished(wait=True)
    start = bytes_read()
    checkpoints.restore_params(1, small_params((1024, 1024)))
    assert 4 * MB <= bytes_read() - start < 5 * MB


def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


# A save in the background


class Overwritten:
    """Arrays of some kind that are gone, and their memory used anew, once `overwrite` was called."""

    def __init__(self, kind):
        self.values = np.arange(2 * MB, dtype=np.float32).reshape(2048, 1024)
        if kind == "numpy":
            self.array = self.values.copy()
        else:
            mesh = Mesh(np.array(jax.devices()), "x")
            sharding = {
                "one device": SingleDeviceSharding(jax.devices()[3]),
                "sharded": NamedSharding(mesh, PartitionSpec(None, "x")),
                "replicated": NamedSharding(mesh, PartitionSpec()),
            }[kind]
            self.array = jax.jit(lambda x: x + 0, out_shardings=sharding)(jax.device_put(self.values, sharding))
        self._next = jax.jit(lambda x: -1 - x, donate_argnums=0)

    def overwrite(self):
        if isinstance(self.array, np.ndarray):
            self.array[:] = -1
            return
        old, self.array = self.array, jax.block_until_ready(self._next(self.array))
        old.delete()


@pytest.mark.parametrize("kind", ["one device", "sharded", "replicated", "numpy"])
def test_what_is_written_is_what_the_arrays_held_when_save_was_called(checkpoints, kind):
    arrays = [Overwritten(kind) for _ in range(4)]
    params = {"u": {str(i): some.array for i, some in enumerate(arrays)}}
    count = np.array(5)
    checkpoints.save(1, params, {"u": {"count": count, "scalar": 3}}, FACTS)
    del params
    count[...] = -1
    while True:  # over and over while it is written, once at least
        for some in arrays:
            some.overwrite()
        if checkpoints.finished():
            break
    wanted = {
        "params": {"u": {str(i): jax.ShapeDtypeStruct((2048, 1024), np.float32, sharding=HOME) for i in range(4)}},
        "optimizer": {"u": {"count": np.array(0), "scalar": 0}},
    }
    params, optimizer = checkpoints.restore(1, wanted)
    for some, found in zip(arrays, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(found), some.values)
    assert (int(optimizer["u"]["count"]), optimizer["u"]["scalar"]) == (5, 3)


def test_a_save_waits_for_the_one_before_it_and_both_are_told_in_order(checkpoints):
    checkpoints.save(1, *small(1.0))
    checkpoints.save(2, *small(2.0))
    assert checkpoints.latest_step in (1, 2), "two saves are never in flight"
    first, second = checkpoints.finished(wait=True)
    assert (first.step, second.step, checkpoints.latest_step) == (1, 2, 2)
    assert checkpoints.finished(wait=True) == []
    for saved in (first, second):
        assert 0 < saved.blocking_seconds <= saved.seconds
        assert saved.path == checkpoints.directory / str(saved.step)


def test_a_synchronous_save_is_committed_when_it_returns(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, asynchronous=False)
    checkpoints.save(1, *small())
    assert checkpoints.latest_step == 1
    (saved,) = checkpoints.finished()
    assert saved.blocking_seconds == saved.seconds > 0


def test_closing_waits_for_the_save_in_flight(checkpoints):
    checkpoints.save(1, *small())
    checkpoints.close()
    assert checkpoints.latest_step == 1
    assert [saved.step for saved in checkpoints.finished()] == [1]


def test_the_last_ones_are_kept_and_a_new_process_finds_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest_step is None
    for step in (1, 2, 5, 9):
        checkpoints.save(step, *small())
    checkpoints.close()
    assert Checkpoints(tmp_path / "c", keep=2).latest_step == 9
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["5", "9"]


def test_a_step_can_be_saved_again(checkpoints):
    for value in (1.0, 2.0):
        checkpoints.save(1, *small(value))
        checkpoints.finished(wait=True)
        assert float(checkpoints.restore_params(1, small_params())["u"]["w"][0, 0]) == value


def test_only_a_save_removes_what_another_left_unfinished(tmp_path):
    """A reader may look while a run writes."""
    unfinished = tmp_path / "c" / "7.orbax-checkpoint-tmp"
    unfinished.mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest_step is None
    checkpoints.close()
    assert unfinished.exists()
    writer = Checkpoints(tmp_path / "c", keep=2)
    writer.save(1, *small())
    writer.close()
    assert not unfinished.exists()


# Failures


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (small_params((4, 4)), "params of unit u, w: float32[8,4] in the checkpoint, float32[4,4] in the model"),
        (small_params((16, 4)), "params of unit u, w: float32[8,4] in the checkpoint, float32[16,4] in the model"),
        (small_params((8,)), "params of unit u, w: float32[8,4] in the checkpoint, float32[8] in the model"),
        (small_params(dtype=jnp.bfloat16), "w: float32[8,4] in the checkpoint, bfloat16[8,4] in the model"),
        ({"u": {}}, "params of unit u, w: float32[8,4] in the checkpoint, missing in the model"),
        ({"v": small_params()["u"]}, "params of unit v, w: missing in the checkpoint, float32[8,4] in the model"),
    ],
    ids=["cut", "padded", "rank", "dtype", "leaf", "unit"],
)
def test_parameters_that_differ_are_refused_with_both_sides_named(checkpoints, wanted, told):
    checkpoints.save(1, *small())
    checkpoints.finished(wait=True)
    with pytest.raises(CheckpointError) as refused:
        checkpoints.restore_params(1, wanted)
    assert told in str(refused.value)
    assert str(refused.value).startswith(str(checkpoints.directory / "1"))
    assert "\n" not in str(refused.value)
    with pytest.raises(
        CheckpointError, match=r"optimizer of unit u, mu: float32\[8,4\] in the checkpoint, missing"
    ):
        checkpoints.restore(1, {"params": small_params(), "optimizer": {}})


def test_a_step_that_was_not_committed_is_named_beside_those_that_were(checkpoints):
    with pytest.raises(CheckpointError, match="no such checkpoint; committed steps: none"):
        checkpoints.facts(3)
    checkpoints.save(1, *small())
    checkpoints.save(4, *small())
    checkpoints.finished(wait=True)
    for ask in (
        checkpoints.facts,
        checkpoints.shapes,
        lambda step: checkpoints.restore_params(step, small_params()),
    ):
        with pytest.raises(CheckpointError, match=r"/3: there is no such checkpoint; committed steps: 1, 4$"):
            ask(3)


# Reads that Orbax still has in flight when the first one fails complain of its closed loop; so do writes.
CLOSED_LOOP = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@CLOSED_LOOP
@pytest.mark.parametrize(
    "damage", ["empty", "_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt", "data"]
)
def test_a_damaged_checkpoint_is_one_line_with_the_way_out(checkpoints, damage, capfd):
    checkpoints.save(1, *small())
    (saved,) = checkpoints.finished(wait=True)
    if damage == "empty":
        shutil.rmtree(saved.path)
        saved.path.mkdir()
    elif damage == "data":
        for path in saved.path.rglob("d/*"):
            path.write_bytes(path.read_bytes()[:10])
    else:
        (saved.path / damage).unlink()
    capfd.readouterr()
    with pytest.raises(
        CheckpointError, match=r"1: this checkpoint cannot be read \(.*move that directory away"
    ) as told:
        checkpoints.restore_params(1, small_params())
    assert "\n" not in str(told.value)
    assert capfd.readouterr().err == ""


def save_to_the_end(checkpoints, step):
    """Of a state that takes a megabyte."""
    checkpoints.save(step, {"u": {"w": jnp.ones((512, 512))}}, {"u": {"mu": jnp.ones(1)}}, FACTS)
    return checkpoints.finished(wait=True)


@CLOSED_LOOP
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_save_is_told_and_the_next_one_works(tmp_path, asynchronous):
    checkpoints = Checkpoints(tmp_path, 1, asynchronous)
    checkpoints.save(1, *small())
    assert [saved.step for saved in checkpoints.finished(wait=True)] == [1]
    with files_of_at_most(100_000), pytest.raises(CheckpointError, match=r"step 2 could not be saved \(") as told:
        save_to_the_end(checkpoints, 2)
    assert "File too large" in str(told.value)
    assert "\n" not in str(told.value)
    assert [path.name for path in tmp_path.iterdir()] == ["1"], "what was written is gone"
    assert float(checkpoints.restore_params(1, small_params())["u"]["w"][0, 0]) == 1
    assert [saved.step for saved in save_to_the_end(checkpoints, 3)] == [3]
    assert checkpoints.latest_step == 3


@CLOSED_LOOP
def test_every_failure_is_told_once_and_hides_no_success(checkpoints):
    checkpoints.save(1, *small())
    for step in (2, 3):
        with files_of_at_most(100_000):
            checkpoints.save(step, {"u": {"w": jnp.ones((512, 512))}}, {"u": {"mu": jnp.ones(1)}}, FACTS)
            wait([checkpoints._in_flight])
    checkpoints.save(4, *small())
    for step in (2, 3):
        with pytest.raises(CheckpointError, match=f"step {step} could not be saved"):
            checkpoints.finished(wait=True)
    assert [saved.step for saved in checkpoints.finished(wait=True)] == [1, 4]


def test_a_state_that_the_disk_has_no_room_for_is_not_begun(checkpoints, monkeypatch):
    checkpoints.save(1, *small())
    checkpoints.finished(wait=True)
    usage = shutil.disk_usage(checkpoints.directory)._replace(free=255)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"it takes 2.56e-07 GB, and the disk has 2.55e-07 GB left"):
        checkpoints.save(2, *small())
    assert [path.name for path in checkpoints.directory.iterdir()] == ["1"]


class files_of_at_most:
    """The system refuses to write a longer file."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


# Other processes

WRITER = """
import itertools, sys
from pathlib import Path
import jax.numpy as jnp
from jax_titan.trainer.checkpoint import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
for step in itertools.count(1):
    tree = {"u": {"w": jnp.full((4, 1024, 1024), step, jnp.float32)}}
    checkpoints.save(step, tree, tree, {"step": step})
"""


def stop_while_writing(process, directory):
    """Stop a writer at a moment when a save is under way and another one is committed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        names = [path.name for path in directory.glob("*")]
        committed = max((int(name) for name in names if name.isdecimal()), default=None)
        if committed is not None and f"{committed + 1}.orbax-checkpoint-tmp" in names:
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    pytest.fail("the writer did not get that far")


def test_a_process_killed_while_it_saves_leaves_the_last_checkpoint_whole(tmp_path):
    directories = [tmp_path / name for name in "abc"]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) for path in directories]
    try:
        for writer, directory in zip(writers, directories, strict=True):
            stop_while_writing(writer, directory)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    for directory in directories:
        checkpoints = Checkpoints(directory, keep=1)
        step = checkpoints.latest_step
        assert step is not None
        assert checkpoints.facts(step) == {"step": step}
        whole = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32, sharding=HOME)
        found = checkpoints.restore(step, {"params": {"u": {"w": whole}}, "optimizer": {"u": {"w": whole}}})
        assert all((np.asarray(leaf) == step).all() for leaf in jax.tree.leaves(found))
        checkpoints.save(step + 1, *small())
        checkpoints.close()
        assert [path.name for path in directory.iterdir()] == [str(step + 1)]


READER = """
import json, re, sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_titan.trainer import checkpoint

def megabytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

checkpoint._IN_FLIGHT_BYTES = 32 * 2**20
sizes = json.loads(sys.argv[2])
devices = np.array(jax.devices()[: sizes[0] * sizes[1]]).reshape(sizes)
sharding = NamedSharding(Mesh(devices, ("x", "y")), PartitionSpec("x", "y"))
checkpoints = checkpoint.Checkpoints(Path(sys.argv[1]), keep=1)
shapes = checkpoints.shapes(1)
wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
jax.block_until_ready(jax.device_put(np.zeros((4, 4)), sharding))
before = megabytes("VmRSS")
params = jax.block_until_ready(checkpoints.restore_params(1, wanted))
print(megabytes("VmHWM") - before)
"""


def test_a_restore_takes_the_memory_of_the_state_and_a_bounded_rest(checkpoints):
    """On CPU the devices' memory is the process's. Glibc is told to give back what is freed: what is counted is
    what was held."""
    params = {f"layers.{i}": {"w": jnp.full((2048, 2048), float(i))} for i in range(10)}
    state_mb = 160
    checkpoints.save(1, params, {"u": {"count": jnp.zeros(1)}}, FACTS)
    checkpoints.finished(wait=True)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MB), "JAX_NUM_CPU_DEVICES": "8"}
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(checkpoints.directory), json.dumps(sizes)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for sizes in ((1, 1), (4, 2))
    ]
    beyond = [float(reader.communicate()[0]) - state_mb for reader in readers]
    assert max(beyond) < 32 + 16, "what may be in flight, and the descriptions"
    assert min(beyond) > 0
