"""The command as a user types it, in processes of its own: two runs that the oldest supported JAX must do too."""

import json
import os
import subprocess
import sys

import pytest

SMALL = (
    "--model.layers 4 --model.dim 32 --model.heads 2 --model.kv_heads 1 --model.ffn_dim 48 --data.tokenizer bytes "
    "--train.sequence_length 32 --train.steps 8 --optimizer.warmup_steps 2 --eval.every 4 --eval.batches 1"
).split()


def train(run_dir, *flags):
    command = [sys.executable, "-m", "jax_titan", "train", "llama3-debug", "--run.dir", str(run_dir), *SMALL]
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")}
    result = subprocess.run([*command, *flags], capture_output=True, text=True, env=environment, timeout=400)
    return result


def events(run_dir, kind):
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def losses(run_dir):
    return {event["step"]: event["loss"] for event in events(run_dir, "step")}


def test_a_pipeline_of_four_stages_trains_stops_and_goes_on(tmp_path):
    straight = train(tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    assert sorted(losses(tmp_path / "straight")) == list(range(1, 9))
    assert losses(tmp_path / "straight")[8] < losses(tmp_path / "straight")[1]
    assert [event["step"] for event in events(tmp_path / "straight", "eval")] == [4, 8]
    assert events(tmp_path / "straight", "attempt_start")[0]["stages"] == 4
    assert events(tmp_path / "straight", "compile")[0]["fragments"] == 15
    for stop in ("3", "6", "0"):
        part = train(tmp_path / "parts", "--train.stop_after", stop)
        assert part.returncode == 0, part.stderr
    assert losses(tmp_path / "parts") == losses(tmp_path / "straight")  # bit for bit
    assert [event["resume_step"] for event in events(tmp_path / "parts", "attempt_start")] == [0, 3, 6]
    shown = subprocess.run(
        [sys.executable, "-m", "jax_titan", "summarize", str(tmp_path / "parts"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    summary = json.loads(shown.stdout)
    assert summary["steps"] == 8
    assert summary["attempts"] == 3
    assert summary["last_loss"] == losses(tmp_path / "straight")[8]


def test_one_program_gives_the_numbers_of_the_pipeline(tmp_path):
    for name, flags in {
        "mpmd": ["--pipeline.stages", "2", "--pipeline.schedule", "gpipe", "--model.tied", "true"],
        "spmd": ["--parallel.layout", "spmd", "--parallel.data", "3", "--model.tied", "true"],
    }.items():
        result = train(tmp_path / name, *flags)
        assert result.returncode == 0, result.stderr
    found, expected = losses(tmp_path / "mpmd"), losses(tmp_path / "spmd")
    assert found == pytest.approx(expected, rel=1e-5)
