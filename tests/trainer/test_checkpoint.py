"""A checkpoint gives back every bit, on the same cut or another, and only whole ones count."""

import json

import jax
import numpy as np
import pytest
from trainer.runs import BATCH, batch, demo_model, demo_optimizer, make_layout

from jax_titan.trainer.checkpoint import Checkpoints, size_bytes
from jax_titan.trainer.errors import CheckpointError

SMALL = {"layers": 3, "dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 48, "vocab_size": 61}


def layout_of(stages, tied=True):
    model = demo_model(tied, "float32", **SMALL, sequence_length=32)
    return make_layout(model, demo_optimizer(), stages, "1f1b", 2, (BATCH, 32))


def trained(layout, steps=2):
    state = layout.init(3)
    for step in range(steps):
        state, _ = layout.step(state, batch(step, 61, 32))
    return state


def leaves(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.optimizer))]


@pytest.mark.parametrize(("before", "after"), [(3, 3), (0, 0), (3, 2), (2, 0), (0, 5)])
def test_a_state_comes_back_bit_for_bit_where_it_belongs(tmp_path, before, after):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    state = trained(layout_of(before))
    checkpoints.save(2, state.params, state.optimizer, {"data_digest": "abc"})
    other = layout_of(after)
    found = other.adopt(*checkpoints.restore(2, other.state_shardings()))
    for a, b in zip(leaves(state), leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    expected = other.init(0)
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        assert a.devices() == b.devices()
    # and it trains on: the replica of a tied table is made anew from what was restored
    some = batch(9, 61, 32)
    _, here = layout_of(before).step(state, some)
    _, there = other.step(found, some)
    assert float(here["loss"]) == pytest.approx(float(there["loss"]), rel=1e-5)
    assert checkpoints.facts(2) == {"data_digest": "abc"}
    checkpoints.close()


def test_the_last_ones_are_kept_and_a_new_process_finds_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    state = layout_of(0).init(0)
    assert checkpoints.latest_step is None
    for step in (1, 2, 5, 9):
        path = checkpoints.save(step, state.params, state.optimizer, {})
        assert (size_bytes(path) or 0) > 0
    checkpoints.close()
    reopened = Checkpoints(tmp_path / "c", keep=2)
    assert reopened.latest_step == 9
    assert sorted(int(p.name) for p in (tmp_path / "c").iterdir() if p.name.isdigit()) == [5, 9]
    reopened.close()


def test_a_step_can_be_saved_again(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    layout = layout_of(0)
    state = layout.init(0)
    checkpoints.save(1, state.params, state.optimizer, {})
    again = trained(layout)
    checkpoints.save(1, again.params, again.optimizer, {})
    params, _ = checkpoints.restore(1, layout.state_shardings())
    np.testing.assert_array_equal(np.asarray(params["embed"]["table"]), np.asarray(again.params["embed"]["table"]))
    checkpoints.close()


def test_parameters_are_keyed_by_unit_and_not_compressed(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    state = layout_of(3).init(0)
    path = checkpoints.save(1, state.params, state.optimizer, {})
    checkpoints.close()
    metadata = json.loads((path / "state" / "_METADATA").read_text())
    units = {eval(key)[1] for key in metadata["tree_metadata"]}
    assert units == {"embed", "layers.0", "layers.1", "layers.2", "head"}
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.optimizer)))
    assert (size_bytes(path) or 0) >= held


def test_a_checkpoint_of_another_model_is_refused_with_the_way_out(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    state = layout_of(0).init(0)
    checkpoints.save(1, state.params, state.optimizer, {})
    other = make_layout(
        demo_model(False, "float32", **(SMALL | {"dim": 16}), sequence_length=32),
        demo_optimizer(),
        0,
        "",
        2,
        (24, 32),
    )
    with pytest.raises(CheckpointError, match="move that directory away"):
        checkpoints.restore(1, other.state_shardings())
    checkpoints.close()
