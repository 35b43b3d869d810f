"""A run may start from another's weights, and go on in another layout, and nothing is lost on the way."""

import jax
import numpy as np
import pytest

from jax_titan.cli import main
from jax_titan.config import ConfigError, load
from jax_titan.observability.records import read_events
from jax_titan.trainer.checkpoint import Checkpoints
from jax_titan.trainer.train import train

TINY = (
    "--model.layers 2 --model.dim 16 --model.heads 2 --model.kv_heads 2 --model.ffn_dim 24 --data.tokenizer bytes "
    "--train.sequence_length 16 --train.batch 8 --train.microbatches 2 --train.steps 16 --eval.every 0 "
    "--eval.batches 1 --checkpoint.every 0 --checkpoint.keep 9"
).split()


def run(directory, *flags):
    assert train(load("llama3-debug", [*TINY, "--run.dir", str(directory), *" ".join(flags).split()])) == 0


def losses(directory):
    return {e["step"]: e["loss"] for e in read_events(directory / "events.jsonl") if e["event"] == "step"}


CHAIN = [
    "--pipeline.stages 4",
    "--pipeline.stages 2 --parallel.tensor 2",
    "--parallel.layout spmd --parallel.fsdp 2",
    "--parallel.layout spmd --parallel.scan_layers true --parallel.data 2",
    "--pipeline.stages 3 --pipeline.fsdp 1,2,1",
    "--pipeline.stages 4 --train.remat full --train.loss_chunk 7",
]


def test_a_run_goes_on_in_any_layout_as_if_it_had_never_changed(tmp_path):
    run(tmp_path / "straight", "--pipeline.stages 4 --train.stop_after 12")
    for part, flags in enumerate(CHAIN):
        run(tmp_path / "moved", flags, f"--train.stop_after {2 * part + 2}")
    moved, straight = losses(tmp_path / "moved"), losses(tmp_path / "straight")
    assert moved.keys() == straight.keys() == set(range(1, 13))
    for step, loss in straight.items():
        assert moved[step] == pytest.approx(loss, rel=1e-5)


def test_what_a_layout_restores_and_saves_again_is_the_same_to_the_bit(tmp_path):
    """Through every layout of the chain and back, without a step between."""
    from trainer.runs import BATCH, batch, demo_model, demo_optimizer, make_meshes

    from jax_titan.trainer.layout import Layout
    from jax_titan.trainer.mpmd import MpmdLayout
    from jax_titan.trainer.spmd import SpmdLayout

    small = {"layers": 4, "dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 48, "vocab_size": 62}
    model, optimizer, shape = (
        demo_model(True, "float32", **small, sequence_length=32),
        demo_optimizer(),
        (BATCH, 32),
    )
    four = MpmdLayout(model, optimizer, make_meshes(*[(1, 1, 1)] * 4), "1f1b", 3, shape)
    state, _ = four.step(four.init(0), batch(0, 62, 32))
    expected = jax.tree.map(lambda x: np.array(x, copy=True), four.to_save(state))
    layouts: list[Layout] = [
        MpmdLayout(model, optimizer, make_meshes(*[(1, 2, 1)] * 2), "1f1b", 3, shape),
        SpmdLayout(model, optimizer, make_meshes((1, 2, 1))[0], 3, shape),
        SpmdLayout(model, optimizer, make_meshes((2, 1, 2))[0], 3, shape, scan_layers=True),
        four,
    ]
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=None)
    current = four.to_save(state)
    for step, layout in enumerate(layouts):
        params, moments = current
        checkpoints.save(step, params, moments, {"step": step})
        checkpoints.finished(wait=True)
        state = layout.adopt(*checkpoints.restore(step, layout.state_shardings()))
        current = layout.to_save(state)
        for a, b in zip(jax.tree.leaves(current), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(a), b)
    checkpoints.close()


def test_a_run_starts_from_the_weights_of_another_and_its_own_optimizer(tmp_path):
    fast = "--optimizer.warmup_steps 0 --optimizer.learning_rate 3e-2"
    run(tmp_path / "first", fast, "--pipeline.stages 3 --train.stop_after 6")
    first = losses(tmp_path / "first")
    start = f"{fast} --model.init_from {tmp_path / 'first'} --parallel.layout spmd --parallel.fsdp 2"
    start += " --train.stop_after 2"
    run(tmp_path / "second", start)
    second = losses(tmp_path / "second")
    assert second[1] < 0.9 * first[1]  # the same batch as the first run's first, with weights that have learnt
    run(tmp_path / "second", start.replace("stop_after 2", "stop_after 4"))  # and it goes on as any run does
    assert set(losses(tmp_path / "second")) == {1, 2, 3, 4}


def test_the_vocabulary_comes_with_the_weights(tmp_path):
    bpe = "--data.tokenizer bpe --data.vocab_size 300 --pipeline.stages 2 --train.stop_after 1"
    run(tmp_path / "first", bpe)
    (tmp_path / "other.txt").write_text("quite another text, of other words. " * 200)
    run(tmp_path / "second", bpe, f"--model.init_from {tmp_path / 'first'} --data.path {tmp_path / 'other.txt'}")
    assert (tmp_path / "second" / "tokenizer.json").read_bytes() == (
        tmp_path / "first" / "tokenizer.json"
    ).read_bytes()


def test_weights_that_do_not_fit_are_refused_in_one_line(tmp_path, capsys):
    run(tmp_path / "first", "--pipeline.stages 2 --train.stop_after 1")
    start = ["--model.init_from", str(tmp_path / "first"), "--run.dir", str(tmp_path / "second")]
    for flags, said in (
        (["--model.ffn_dim", "32"], "layers.0 w_gate is [16, 24] there and [16, 32] here (and 5 more)"),
        (["--model.layers", "3"], "layers.2 attention_norm is only here (and 8 more)"),
        (["--model.tied", "true"], "head unembed is only there"),
    ):
        with pytest.raises(ConfigError) as error:
            train(load("llama3-debug", [*TINY, *start, *flags]))
        (problem,) = error.value.problems
        assert problem.startswith("model.init_from: ")
        assert problem.endswith(said)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    words = [
        "train",
        "llama3-debug",
        *TINY,
        "--model.init_from",
        str(tmp_path / "empty"),
        "--run.dir",
        str(tmp_path / "x"),
    ]
    assert main(words) == 2
    assert "has no checkpoint; name a run that has saved one" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
