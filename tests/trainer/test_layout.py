"""Same numbers: every cut, schedule and number of microbatches trains like one device (design, "Same numbers")."""

import contextlib
import itertools

import jax
import numpy as np
import pytest
from trainer.runs import BATCH, batch, demo_model, demo_optimizer, make_layout, run

from jax_titan.models.unit import forward

SHORT, LONG = 3, 20
STAGES, SCHEDULES, MICROBATCHES, TIED = (1, 2, 4), ("gpipe", "1f1b"), (1, 3, 8), (False, True)
EVERY = list(itertools.product(STAGES, SCHEDULES, MICROBATCHES, TIED))
SAMPLE = [(4, "1f1b", 8, False), (4, "gpipe", 3, True), (2, "1f1b", 1, True), (1, "gpipe", 3, True)]
CRITERIA = {
    # dtype: (loss, grad norm along the run)
    "float64": (1e-10, 1e-10),
    "float32": (1e-5, 1e-3),
}
_references = {}


def batches(model, steps):
    vocab_size = model.units[0].parameters["table"].shape[0]
    return [batch(seed, vocab_size, 128) for seed in range(steps)]


def precision(dtype):
    return jax.enable_x64() if dtype == "float64" else contextlib.nullcontext()


def reference(dtype, microbatches, tied, steps):
    """SPMD on one device, run once for all the layouts that are compared with it."""
    key = (dtype, microbatches, tied, steps)
    if key not in _references:
        model = demo_model(tied, dtype)
        layout = make_layout(model, demo_optimizer(LONG), 0, "", microbatches, (BATCH, 128))
        _references[key] = run(layout, batches(model, steps))
    return _references[key]


def check(dtype, stages, schedule, microbatches, tied, steps):
    with precision(dtype):
        model = demo_model(tied, dtype)
        layout = make_layout(model, demo_optimizer(LONG), stages, schedule, microbatches, (BATCH, 128))
        losses, norms = run(layout, batches(model, steps))
        expected_losses, expected_norms = reference(dtype, microbatches, tied, steps)
    of_loss, of_norm = CRITERIA[dtype]
    assert np.all(np.isfinite(losses))
    np.testing.assert_allclose(losses, expected_losses, rtol=of_loss)
    np.testing.assert_allclose(norms, expected_norms, rtol=of_norm)


@pytest.mark.parametrize(
    ("dtype", "stages", "schedule", "microbatches", "tied"),
    [("float64", 4, "1f1b", 8, False), ("float64", 2, "gpipe", 3, True), ("float32", 4, "1f1b", 3, True)],
)
def test_a_sample_of_layouts_gives_the_numbers_of_one_device(dtype, stages, schedule, microbatches, tied):
    check(dtype, stages, schedule, microbatches, tied, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", CRITERIA)
@pytest.mark.parametrize(("stages", "schedule", "microbatches", "tied"), EVERY)
def test_every_layout_gives_the_numbers_of_one_device(dtype, stages, schedule, microbatches, tied):
    check(dtype, stages, schedule, microbatches, tied, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", CRITERIA)
@pytest.mark.parametrize(("stages", "schedule", "microbatches", "tied"), SAMPLE)
def test_twenty_steps_give_the_numbers_of_one_device(dtype, stages, schedule, microbatches, tied):
    check(dtype, stages, schedule, microbatches, tied, LONG)


@pytest.mark.parametrize("tied", TIED)
def test_one_steps_gradients_agree_leaf_by_leaf_in_float32(tied):
    model = demo_model(tied, "float32")
    some = batches(model, 1)[0]
    found = []
    for stages in (0, 4):
        layout = make_layout(model, demo_optimizer(), stages, "1f1b", 3, (BATCH, 128))
        loss, gradients = layout.gradients(layout.init(0), some)
        found.append((float(loss), jax.tree.map(np.asarray, gradients)))
    (loss_a, a), (loss_b, b) = found
    assert loss_a == pytest.approx(loss_b, rel=1e-5)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        difference = np.linalg.norm((x - y).astype(np.float64))
        assert difference <= 1e-5 * np.linalg.norm(x.astype(np.float64)), jax.tree_util.keystr(path)
    norm = [np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(t))) for t in (a, b)]
    assert norm[0] == pytest.approx(norm[1], rel=1e-6)


SMALL = {"layers": 3, "dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 48, "vocab_size": 61}


def small_model(tied=False, dtype="float32", length=32):
    return demo_model(tied, dtype, **SMALL, sequence_length=length)


@pytest.mark.parametrize("stages", [0, 3])
@pytest.mark.parametrize("tied", TIED)
def test_unequal_weights_give_the_gradient_of_one_large_batch(stages, tied):
    with jax.enable_x64():
        model = small_model(tied, "float64")
        some = batch(5, 61, 32)
        weights = [w.sum() for w in np.split(some["weights"], 8)]
        assert min(weights) == 0 < max(weights)  # the masks are as hard as they say

        def mean_loss(params):
            loss_sum, weight_sum, _ = forward(model.units, params, some)
            return loss_sum / weight_sum

        params = model.init(jax.random.key(0))
        expected_loss, expected = jax.jit(jax.value_and_grad(mean_loss))(params)
        layout = make_layout(model, demo_optimizer(), stages, "1f1b", 8, (BATCH, 32))
        loss, gradients = layout.gradients(layout.init(0), some)
        assert float(loss) == pytest.approx(float(expected_loss), rel=1e-12)
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("stages", [0, 1, 2, 5])
def test_the_first_state_is_the_same_on_every_layout(stages):
    model = small_model(tied=True)
    layout = make_layout(model, demo_optimizer(), stages, "1f1b", 2, (BATCH, 32))
    expected = make_layout(model, demo_optimizer(), 3, "gpipe", 2, (BATCH, 32)).init(7)
    found = layout.init(7)
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_state_is_born_on_its_own_stage_and_stays_there():
    model = small_model(tied=True)
    layout = make_layout(model, demo_optimizer(), 3, "1f1b", 4, (BATCH, 32))
    state = layout.init(0)
    for _ in range(2):
        homes = [
            {leaf.device for leaf in jax.tree.leaves((state.params[u.name], state.optimizer[u.name]))}
            for units in layout._step.stages
            for u in units
        ]
        stages = [{jax.devices()[s]} for s, units in enumerate(layout._step.stages) for _ in units]
        assert homes == stages
        state, _ = layout.step(state, batch(0, 61, 32))


def test_a_tied_table_crosses_once_a_step_and_never_a_microbatch():
    model = small_model(tied=True)
    table_bytes = 61 * 32 * 4
    for microbatches in (2, 12):
        pipeline = make_layout(model, demo_optimizer(), 3, "1f1b", microbatches, (BATCH, 32)).pipeline
        of_update = pipeline.update_program
        big = [t for t in of_update.transfers() if of_update.values[t.source].global_bytes == table_bytes]
        assert len(big) == 1  # the gradient; the new values follow as the pipeline's own copy
        # A boundary a direction and microbatch; the gradient and the copy; a scalar to and from the last stage.
        assert pipeline.report.transfers_per_step == microbatches * 4 + 2 + 4


def test_the_programs_for_64_microbatches_are_those_for_4():
    model = small_model()
    programs = []
    for microbatches in (4, 64):
        pipeline = make_layout(model, demo_optimizer(), 3, "1f1b", microbatches, (2 * microbatches, 32)).pipeline
        programs.append((pipeline.accumulate_program, pipeline.update_program, pipeline.report.fragments))
    assert programs[0] == programs[1]


def test_fewer_microbatches_than_stages_work():
    model = small_model()
    some = [batch(s, 61, 32) for s in range(2)]
    expected = run(make_layout(model, demo_optimizer(), 0, "", 1, (BATCH, 32)), some)
    for stages, schedule in ((5, "1f1b"), (5, "gpipe")):
        for microbatches in (1, 2):
            found = run(make_layout(model, demo_optimizer(), stages, schedule, microbatches, (BATCH, 32)), some)
            np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)


@pytest.mark.parametrize("stages", [0, 3])
def test_changing_one_packed_document_moves_no_loss_of_another(stages):
    """Each token's loss is a function of its logits; weights pick the tokens of all documents but one."""
    model = small_model()
    layout = make_layout(model, demo_optimizer(), stages, "1f1b", 2, (BATCH, 32))
    state = layout.init(0)
    some = batch(3, 61, 32)
    rng = np.random.default_rng(0)
    row = int(np.argmax(some["segments"].max(axis=1)))
    for changed in range(1, int(some["segments"][row].max()) + 1):
        inside = np.zeros((BATCH, 32), bool)
        inside[row] = some["segments"][row] == changed
        others = (rng.random((BATCH, 32)) * ~inside * (some["segments"] > 0)).astype(np.float32)
        before = some | {"weights": others}
        after = before | {"tokens": np.where(inside, (some["tokens"] + 7) % 61, some["tokens"])}
        assert float(layout.eval_step(state, before)) == float(layout.eval_step(state, after))
        seen = inside.astype(np.float32)  # and the change is one: the document's own loss moves
        assert float(layout.eval_step(state, before | {"weights": seen})) != float(
            layout.eval_step(state, after | {"weights": seen})
        )


@pytest.mark.parametrize("stages", [0, 2])
def test_evaluation_is_the_loss_of_the_step_and_leaves_the_state_usable(stages):
    model = small_model(tied=True)
    layout = make_layout(model, demo_optimizer(), stages, "1f1b", 4, (BATCH, 32))
    state = layout.init(0)
    some = batch(1, 61, 32)
    mean = float(layout.eval_step(state, some)) / some["weights"].sum()
    for _ in range(2):
        state, metrics = layout.step(state, some)
        assert float(metrics["loss"]) == pytest.approx(mean, rel=1e-6)
        mean = float(layout.eval_step(state, some)) / some["weights"].sum()


@pytest.mark.parametrize("stages", [0, 2])
def test_a_batch_without_any_target_changes_nothing_but_decay_and_stays_finite(stages):
    model = small_model()
    layout = make_layout(model, demo_optimizer(), stages, "1f1b", 2, (BATCH, 32))
    empty = batch(1, 61, 32)
    empty = empty | {"weights": np.zeros_like(empty["weights"]), "segments": np.zeros_like(empty["segments"])}
    state, metrics = layout.step(layout.init(0), empty)
    assert float(metrics["loss"]) == 0.0
    assert float(metrics["grad_norm"]) == 0.0
    assert all(np.all(np.isfinite(np.asarray(leaf))) for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("stages", [0, 2])
def test_a_batch_of_another_shape_is_refused_by_name(stages):
    layout = make_layout(small_model(), demo_optimizer(), stages, "1f1b", 2, (BATCH, 32))
    with pytest.raises(ValueError, match=r"batch\['tokens'\] is \(12, 32\); this layout was built for \(24, 32\)"):
        layout.step(layout.init(0), batch(0, 61, 32, sequences=12))
    with pytest.raises(ValueError, match="24 sequences cannot be cut into 5 equal microbatches"):
        make_layout(small_model(), demo_optimizer(), stages, "1f1b", 5, (BATCH, 32))


def test_the_old_replica_is_gone_before_the_new_one_is_made():
    layout = make_layout(small_model(tied=True), demo_optimizer(), 3, "1f1b", 2, (BATCH, 32))
    state = layout.init(0)
    after, _ = layout.step(state, batch(0, 61, 32))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))
