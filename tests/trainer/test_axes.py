"""Same numbers on every kind of mesh: axes inside stages, unequal stages, remat, chunked loss, scanned layers."""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from trainer.runs import BATCH, batch, demo_model, demo_optimizer, make_meshes, run

from jax_titan.mpmd.program import Transfer
from jax_titan.trainer.mpmd import MpmdLayout
from jax_titan.trainer.remat import rematerialised
from jax_titan.trainer.spmd import SpmdLayout

SMALL = {"layers": 4, "dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 48, "vocab_size": 62}
LENGTH, MICROBATCHES = 32, 3
ONE, DATA, FSDP, TENSOR = (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)
DATA_TENSOR, ALL = (2, 1, 2), (2, 2, 2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout and its options; no stage is a mesh of its own in SPMD."""

    stages: tuple[tuple[int, int, int], ...]
    spmd: bool = False
    tied: bool = False
    remat: str = "none"
    loss_chunk: int = 0
    scan: bool = False

    def __str__(self):
        sizes = "-".join("".join(map(str, stage)) for stage in self.stages)
        words = ["spmd" if self.spmd else f"mpmd{len(self.stages)}", sizes]
        words += ["tied"] * self.tied + [self.remat] * (self.remat != "none")
        return "_".join(words + [f"chunk{self.loss_chunk}"] * bool(self.loss_chunk) + ["scan"] * self.scan)


CASES = [
    *(Case((axes,) * 2) for axes in (ONE, DATA, FSDP, TENSOR, DATA_TENSOR)),
    *(Case((axes,) * 4) for axes in (ONE, DATA, FSDP, TENSOR)),
    *(Case((ONE, axes, ONE)) for axes in (DATA, FSDP, TENSOR)),
    Case((DATA, FSDP, TENSOR), tied=True),
    Case((TENSOR, ONE), tied=True),
    *(Case((axes,), spmd=True) for axes in (DATA, FSDP, TENSOR, DATA_TENSOR, ALL)),
    Case((FSDP,), spmd=True, tied=True),
    Case((TENSOR,) * 2, remat="full"),
    Case((FSDP,) * 4, remat="dots"),
    Case((TENSOR,), spmd=True, remat="query,ffn_out"),
    Case((ONE,), spmd=True, remat="full"),
    Case((DATA,) * 2, loss_chunk=40),
    Case((TENSOR,) * 2, tied=True, loss_chunk=100),
    Case((FSDP,) * 4, loss_chunk=8),
    Case((ALL,), spmd=True, loss_chunk=40),
    Case((ONE,), spmd=True, scan=True),
    Case((FSDP,), spmd=True, scan=True, remat="dots"),
    Case((DATA_TENSOR,), spmd=True, scan=True, tied=True, loss_chunk=40),
    Case((ALL,), spmd=True, scan=True, remat="full", loss_chunk=40),
    Case((DATA_TENSOR,) * 2, tied=True, remat="full", loss_chunk=40),
    Case((ONE, DATA_TENSOR, FSDP), remat="dots", loss_chunk=40),
]
SAMPLE = [
    Case((DATA_TENSOR,) * 2, tied=True, remat="full", loss_chunk=40),
    Case((ONE, FSDP, ONE)),
    Case((FSDP,), spmd=True, scan=True, remat="dots"),
]


def model_of(case, dtype):
    model = demo_model(case.tied, dtype, **SMALL, sequence_length=LENGTH, loss_chunk=case.loss_chunk)
    return rematerialised(model, case.remat)


def layout_of(case, dtype="float32") -> Any:
    model, meshes = model_of(case, dtype), make_meshes(*case.stages)
    if case.spmd:
        return SpmdLayout(model, demo_optimizer(), meshes[0], MICROBATCHES, (BATCH, LENGTH), case.scan)
    return MpmdLayout(model, demo_optimizer(), meshes, "1f1b", MICROBATCHES, (BATCH, LENGTH))


def reference(case, dtype, steps):
    """One device, one program, none of the options."""
    return layout_of(Case((ONE,), spmd=True, tied=case.tied), dtype), batches(steps)


def batches(steps):
    return [batch(seed, SMALL["vocab_size"], LENGTH) for seed in range(steps)]


_expected = {}


def check(case, dtype, steps, of_loss, of_norm):
    with jax.enable_x64() if dtype == "float64" else contextlib.nullcontext():
        key = (case.tied, dtype, steps)
        if key not in _expected:
            _expected[key] = run(*reference(case, dtype, steps))
        losses, norms = run(layout_of(case, dtype), batches(steps))
    expected_losses, expected_norms = _expected[key]
    assert np.all(np.isfinite(losses))
    np.testing.assert_allclose(losses, expected_losses, rtol=of_loss)
    np.testing.assert_allclose(norms, expected_norms, rtol=of_norm)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_sample_gives_the_numbers_of_one_device_in_float64(case):
    check(case, "float64", 3, 1e-10, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_gives_the_numbers_of_one_device_in_float64(case):
    check(case, "float64", 20, 1e-10, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_every_fourth_case_gives_the_numbers_of_one_device_in_float32(case):
    check(case, "float32", 20, 1e-5, 1e-3)


@pytest.mark.parametrize("case", [SAMPLE[0], SAMPLE[2]], ids=str)
def test_one_steps_gradients_agree_leaf_by_leaf_in_float32(case):
    found = []
    for layout in (reference(case, "float32", 1)[0], layout_of(case)):
        loss, gradients = layout.gradients(layout.init(0), batches(1)[0])
        found.append((float(loss), jax.tree.map(np.asarray, gradients)))
    (loss_a, a), (loss_b, b) = found
    assert loss_a == pytest.approx(loss_b, rel=1e-5)
    assert jax.tree.structure(a) == jax.tree.structure(dict(sorted(b.items())))
    for unit in a:
        for leaf, x in a[unit].items():
            difference = np.linalg.norm((x - b[unit][leaf]).astype(np.float64))
            assert difference <= 1e-5 * np.linalg.norm(x.astype(np.float64)), (unit, leaf)
    norm = [np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(t))) for t in (a, b)]
    assert norm[0] == pytest.approx(norm[1], rel=1e-6)


@pytest.mark.parametrize("case", [Case((ALL,), spmd=True), Case((ONE, TENSOR, FSDP)), SAMPLE[2]], ids=str)
def test_the_first_state_does_not_depend_on_the_mesh(case):
    layout = layout_of(case)
    found = layout.to_save(layout.init(7))
    one = reference(case, "float32", 0)[0]
    expected = one.to_save(one.init(7))
    for unit, leaves in expected[0].items():
        for leaf, x in leaves.items():
            np.testing.assert_array_equal(np.asarray(found[0][unit][leaf]), np.asarray(x))


@pytest.mark.parametrize("case", [Case((ALL,), spmd=True), Case((DATA_TENSOR, FSDP))], ids=str)
def test_each_device_holds_its_part_of_parameters_gradients_and_optimizer_and_keeps_it(case):
    layout = layout_of(case)
    state = layout.init(0)
    for _ in range(2):
        wanted = layout.state_shardings()
        held = {"params": state.params, "optimizer": state.optimizer}
        for (path, leaf), x in zip(
            jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(held), strict=True
        ):
            assert x.sharding.is_equivalent_to(leaf.sharding, x.ndim), jax.tree_util.keystr(path)
        state, _ = layout.step(state, batches(1)[0])
    matrix = state.optimizer["layers.0"][0].mu["w_gate"]
    assert matrix.addressable_shards[0].data.size * (4 if case.spmd else 2) == matrix.size


def test_what_crosses_a_boundary_of_equal_stages_is_one_split_array_each_way():
    """Its parts go from device to device: nothing is gathered, and nothing of the batch is sent."""
    program = layout_of(Case((DATA_TENSOR,) * 2)).pipeline.accumulate_program
    moved = [program.values[t.source] for t in program.operations if isinstance(t, Transfer)]
    assert [(value.shape, value.mesh) for value in moved] == [((8, 32, 32), "mesh0"), ((8, 32, 32), "mesh1")]
    for value in moved:
        assert "data" in str(value.spec[0])


def test_a_program_that_scans_layers_does_not_grow_with_their_number():
    sizes = []
    for layers in (2, 6):
        model = demo_model(False, "float32", **{**SMALL, "layers": layers}, sequence_length=LENGTH)
        layout = SpmdLayout(model, demo_optimizer(), make_meshes(ONE)[0], 2, (BATCH, LENGTH), True)
        sizes.append(layout.lower().as_text().count("\n"))
    assert sizes[0] == sizes[1]


def test_full_remat_keeps_only_what_enters_a_layer_between_forward_and_backward():
    kept = {}
    for remat in ("none", "dots", "full"):
        program = layout_of(Case((ONE,) * 2, remat=remat)).pipeline.accumulate_program
        forward = next(f for f in program.fragments if f.kind == "F" and f.stage == 0)
        kept[remat] = sum(value.global_bytes for value in forward.outputs)
    activation = 8 * LENGTH * SMALL["dim"] * 4
    layers = len(layout_of(Case((ONE,) * 2))._step.stages[0]) - 1
    assert kept["full"] <= (layers + 2) * activation  # and what the stage sends on
    assert kept["full"] < kept["dots"] < kept["none"]


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_one_programs_temporary_memory_is_less_with_remat(remat):
    def temporary_bytes(remat):
        # Deep enough that activations, not gradients, are what the memory is for.
        model = demo_model(False, "float32", **{**SMALL, "layers": 8}, sequence_length=128)
        layout = SpmdLayout(rematerialised(model, remat), demo_optimizer(), make_meshes(ONE)[0], 1, (BATCH, 128))
        analysis = layout.lower().compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary_bytes(remat) < 0.8 * temporary_bytes("none")


def test_an_unknown_value_to_keep_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'quary' is no value of the model llama; these are: attention, "):
        rematerialised(model_of(Case((ONE,)), "float32"), "quary")


def test_a_batch_that_a_mesh_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="24 sequences cannot be cut into 12 equal microbatches for 4 devices"):
        SpmdLayout(model_of(Case((ONE,)), "float32"), demo_optimizer(), make_meshes((4, 1, 1))[0], 12, (BATCH, 32))
