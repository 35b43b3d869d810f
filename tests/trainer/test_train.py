"""A run stops, resumes and refuses as stated, and its record tells exactly what happened."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jax_titan.config import ConfigError, load
from jax_titan.data.errors import DataError
from jax_titan.observability.records import read_events
from jax_titan.observability.summarize import summarize
from jax_titan.trainer.train import train

SMALL = (
    "--model.layers 2 --model.dim 16 --model.heads 2 --model.kv_heads 1 --model.ffn_dim 24 --data.tokenizer bytes "
    "--train.sequence_length 16 --train.batch 8 --train.microbatches 4 --train.steps 20 --eval.every 10 "
    "--eval.batches 2 --optimizer.warmup_steps 2 --checkpoint.every 0 --pipeline.stages 3"
).split()


def run(directory, *flags):
    return train(load("llama3-debug", [*SMALL, "--run.dir", str(directory), *flags]))


def events(directory, kind):
    return [event for event in read_events(directory / "events.jsonl") if event["event"] == kind]


def losses(directory):
    return {event["step"]: (event["loss"], event["grad_norm"]) for event in events(directory, "step")}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    directory = tmp_path_factory.mktemp("straight") / "run"
    assert run(directory) == 0
    return directory


def test_stopping_at_5_10_and_15_of_20_changes_no_bit(straight, tmp_path):
    for stop in (5, 10, 15, 0):
        assert run(tmp_path / "run", "--train.stop_after", str(stop)) == 0
    assert losses(tmp_path / "run") == losses(straight)
    assert [(e["step"], e["loss"]) for e in events(tmp_path / "run", "eval")] == [
        (e["step"], e["loss"]) for e in events(straight, "eval")
    ]
    reasons = [event["reason"] for event in events(tmp_path / "run", "attempt_end")]
    assert reasons == ["stop_after"] * 3 + ["ok"]
    summary = summarize(tmp_path / "run")
    assert (summary["steps"], summary["attempts"], summary["status"]) == (20, 4, "complete")
    assert summary["tokens"] == summarize(straight)["tokens"]


def test_a_lost_attempt_is_trained_again_to_the_same_bits(straight, tmp_path):
    """Steps after the last checkpoint are run again; the record keeps both, the summary counts one."""
    assert run(tmp_path / "run", "--checkpoint.every", "8", "--train.stop_after", "11") == 0
    for step in (11,):  # as if the process had died before its last save
        import shutil

        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    assert run(tmp_path / "run") == 0
    assert losses(tmp_path / "run") == losses(straight)
    assert [event["resume_step"] for event in events(tmp_path / "run", "attempt_start")] == [0, 8]
    summary = summarize(tmp_path / "run")
    assert summary["steps"] == 20
    assert summary["lost_steps"] == 3
    assert summary["tokens"] == summarize(straight)["tokens"]


def test_layout_schedule_and_microbatches_may_change_at_a_resume(straight, tmp_path):
    changes = [
        ["--pipeline.stages", "4", "--pipeline.schedule", "gpipe"],
        ["--parallel.layout", "spmd", "--parallel.data", "2", "--train.microbatches", "2"],
        ["--pipeline.stages", "2", "--train.microbatches", "1"],
    ]
    for stop, flags in zip((6, 12, 20), changes, strict=True):
        assert run(tmp_path / "run", "--train.stop_after", str(stop), *flags) == 0
    found, expected = losses(tmp_path / "run"), losses(straight)
    for step, (loss, norm) in expected.items():
        assert found[step][0] == pytest.approx(loss, rel=1e-5)
        assert found[step][1] == pytest.approx(norm, rel=1e-3)


def test_a_complete_run_is_left_alone(straight, capsys):
    before = (straight / "events.jsonl").read_bytes()
    assert run(straight) == 0
    assert "complete at step 20" in capsys.readouterr().out
    assert (straight / "events.jsonl").read_bytes() == before


def test_a_longer_run_goes_on(tmp_path):
    assert run(tmp_path / "run", "--train.steps", "4", "--eval.every", "0") == 0
    assert run(tmp_path / "run", "--train.steps", "6", "--eval.every", "0") == 0
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def test_every_change_of_what_is_fixed_is_named(straight):
    before = (straight / "config.toml").read_bytes()
    with pytest.raises(ConfigError) as refused:
        run(
            straight,
            "--model.dim",
            "32",
            "--run.seed",
            "5",
            "--optimizer.learning_rate",
            "0.5",
            "--train.steps",
            "30",
        )
    named = [line.split(":")[0] for line in refused.value.problems]
    assert named == ["run.seed", "model.dim", "optimizer.learning_rate", "run.dir"]
    assert (straight / "config.toml").read_bytes() == before


def test_a_directory_that_holds_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"run.dir: .* holds no run"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_corpus_that_changed_under_a_run_is_refused(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"document {i} " * 30}) + "\n" for i in range(20)))
    assert run(tmp_path / "run", "--data.path", str(text), "--train.stop_after", "2") == 0
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    text.write_text(text.read_text() + json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(ConfigError, match="the corpus has changed since this run began"):
        run(tmp_path / "run", "--data.path", str(text))
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


BAD_CORPORA = {
    "latin1.txt": (b"caf\xe9 au lait", r"latin1.txt.* 3\b"),
    "cut.jsonl": (b'{"text": "whole"}\n{"text": "cut of', r"cut.jsonl.*line 2\b|cut.jsonl:2"),
    "fields.jsonl": (b'{"body": "x"}\n', "text"),
}


@pytest.mark.parametrize("name", BAD_CORPORA)
def test_a_bad_corpus_is_named_and_nothing_is_written(tmp_path, name):
    content, named = BAD_CORPORA[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=named) as refused:
        run(tmp_path / "run", "--data.path", str(tmp_path / name))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some text\n" * 50)
    with pytest.raises(ConfigError, match=r"model.vocab_size"):
        run(tmp_path / "run", "--data.path", str(text), "--model.vocab_size", "100")
    assert not (tmp_path / "run").exists()


def test_without_validation_a_run_has_no_evaluations(tmp_path):
    assert run(tmp_path / "run", "--data.validation_fraction", "0", "--train.steps", "2") == 0
    assert events(tmp_path / "run", "eval") == []
    assert summarize(tmp_path / "run")["bits_per_byte"] is None


def test_a_single_text_file_is_enough(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("\n".join(f"line {i} of my notes" for i in range(400)))
    assert run(tmp_path / "run", "--data.path", str(text), "--train.steps", "3") == 0
    assert summarize(tmp_path / "run")["bits_per_byte"] > 0


def test_the_record_adds_up(straight):
    steps, evals = events(straight, "step"), events(straight, "eval")
    assert [event["step"] for event in steps] == list(range(1, 21))
    assert all(event["step_seconds"] > 0 and event["data_wait_seconds"] >= 0 for event in steps)
    assert all(0 < event["tokens"] <= 8 * 16 for event in steps)
    for event in evals:
        assert event["bits_per_byte"] == pytest.approx(
            event["loss"] * event["tokens"] / event["bytes"] / np.log(2), rel=1e-9
        )
    start = events(straight, "attempt_start")[0]
    assert (start["layout"], start["stages"], start["schedule"], start["devices"]) == ("mpmd", 3, "1f1b", 3)
    assert [event["step"] for event in events(straight, "checkpoint")] == [20]
    assert events(straight, "attempt_end")[0]["host_peak_bytes"] > 1e8


def test_a_crash_is_recorded_and_raised(tmp_path, monkeypatch):
    from jax_titan.trainer.mpmd import MpmdLayout

    step, calls = MpmdLayout.step, []

    def fails_at_the_third(self, state, batch):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the roof fell in")
        return step(self, state, batch)

    monkeypatch.setattr(MpmdLayout, "step", fails_at_the_third)
    with pytest.raises(RuntimeError, match="the roof fell in"):
        run(tmp_path / "run")
    end = events(tmp_path / "run", "attempt_end")[0]
    assert (end["reason"], end["exit_code"]) == ("crash", 1)
    assert "the roof fell in" in end["message"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_saves_says_so_exits_75_and_loses_nothing(straight, tmp_path, name):
    command = [sys.executable, "-u", "-m", "jax_titan", "train", "llama3-debug", *SMALL]
    command += ["--run.dir", str(tmp_path / "run"), "--platform.devices", "8"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    output = []
    reader = threading.Thread(target=lambda: output.extend(process.stdout or []))
    reader.start()
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        path = tmp_path / "run" / "events.jsonl"
        if path.exists() and '"event": "step"' in path.read_text():
            process.send_signal(getattr(signal, name))
            break
        time.sleep(0.002)
    code = process.wait(timeout=120)
    reader.join()
    done = max(losses(tmp_path / "run"))
    if done == 20:
        pytest.skip("the run was over before the signal came")
    assert code == 75, process.stderr.read() if process.stderr else ""
    assert f"stopped after step {done}, saved" in "".join(output)
    assert events(tmp_path / "run", "checkpoint")[-1]["step"] == done
    end = events(tmp_path / "run", "attempt_end")[-1]
    assert (end["reason"], end["exit_code"], end["step"]) == (name.lower(), 75, done)
    assert run(tmp_path / "run") == 0
    assert losses(tmp_path / "run") == losses(straight)


def test_a_run_directory_has_one_user_at_a_time(tmp_path):
    command = [sys.executable, "-u", "-m", "jax_titan", "train", "llama3-debug", *SMALL]
    command += ["--run.dir", str(tmp_path / "run"), "--train.steps", "100000", "--platform.devices", "8"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "events.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(ConfigError, match="is in use by another process"):
            run(tmp_path / "run")
    finally:
        process.kill()
        process.wait()
    assert run(tmp_path / "run", "--train.steps", "2") == 0  # the dead process holds nothing


# Reads that Orbax still has in flight when the first one fails complain of its closed loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["empty directory", "metadata", "data"])
def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path, damage, capsys):
    from jax_titan.cli import main

    arguments = ["train", "llama3-debug", *SMALL, "--run.dir", str(tmp_path / "run"), "--checkpoint.every", "2"]
    assert main([*arguments, "--train.stop_after", "4"]) == 0
    newest = tmp_path / "run" / "checkpoints" / "4"
    if damage == "empty directory":
        newest = tmp_path / "run" / "checkpoints" / "9"
        newest.mkdir()
    elif damage == "metadata":
        (newest / "_CHECKPOINT_METADATA").unlink()
    else:
        for path in newest.rglob("*"):
            if path.is_file() and path.parent.name == "d":
                path.write_bytes(path.read_bytes()[:10])
    capsys.readouterr()
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{newest}: this checkpoint cannot be read" in told
    newest.rename(tmp_path / "away")
    assert main([*arguments, "--train.steps", "5"]) == 0
    resumed = events(tmp_path / "run", "attempt_start")[-1]["resume_step"]
    assert resumed == (4 if damage == "empty directory" else 2)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[model", b"[model]\ndims = 3\n"])
def test_a_damaged_config_is_one_line(tmp_path, content):
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        run(tmp_path)
    assert all("config.toml" in problem and "\n" not in problem for problem in refused.value.problems)


def test_what_is_recorded_of_an_end_is_what_happened(tmp_path, monkeypatch):
    try:
        raise ValueError("earlier trouble")
    except ValueError:  # being called from a handler is no failure of the run
        assert run(tmp_path / "fine", "--train.steps", "1") == 0
    end = events(tmp_path / "fine", "attempt_end")[0]
    assert (end["reason"], end["exit_code"], end["message"]) == ("ok", 0, None)

    def broken(*_):
        raise DataError("data.path: gone")

    monkeypatch.setattr("jax_titan.data.text.TextDataset.batch", broken)
    with pytest.raises(DataError):
        run(tmp_path / "broken", "--train.steps", "1")
    end = events(tmp_path / "broken", "attempt_end")[0]
    assert (end["reason"], end["exit_code"]) == ("crash", 2)
    assert "data.path: gone" in end["message"]


def test_a_lost_terminal_loses_no_work(straight, tmp_path):
    """Ctrl-C on `jax-titan train ... 2>&1 | tee log`: tee dies first, and nobody reads any more."""
    reader, writer = os.pipe()
    command = [sys.executable, "-u", "-m", "jax_titan", "train", "llama3-debug", *SMALL]
    command += ["--run.dir", str(tmp_path / "run"), "--platform.devices", "8"]
    process = subprocess.Popen(command, stdout=writer, stderr=writer)
    os.close(writer)
    path, deadline = tmp_path / "run" / "events.jsonl", time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and '"event": "step"' in path.read_text():
            os.close(reader)
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.002)
    code = process.wait(timeout=120)
    done = max(losses(tmp_path / "run"))
    if done == 20:
        pytest.skip("the run was over before the signal came")
    assert code == 75
    assert events(tmp_path / "run", "checkpoint")[-1]["step"] == done
    assert run(tmp_path / "run") == 0
    assert losses(tmp_path / "run") == losses(straight)


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in ("/proc/nowhere/run", str(tmp_path / ("x" * 300)), str(tmp_path / "file" / "run")):
        with pytest.raises(ConfigError) as refused:
            run(directory)
        assert len(refused.value.problems) == 1
        assert refused.value.problems[0].startswith("run.dir: ")


def test_the_record_of_a_run_is_readable_for_others(straight):
    mask = os.umask(0)
    os.umask(mask)
    assert (straight / "config.toml").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("gap_seconds", [0.0, 0.15])
def test_more_signals_change_nothing_of_a_saved_end(tmp_path, gap_seconds):
    command = [sys.executable, "-u", "-m", "jax_titan", "train", "llama3-debug", *SMALL, "--train.steps", "100000"]
    command += ["--run.dir", str(tmp_path / "run"), "--platform.devices", "8"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path, deadline = tmp_path / "run" / "events.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and not (path.exists() and '"event": "step"' in path.read_text()):
        time.sleep(0.01)
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGTERM)
        time.sleep(gap_seconds or 0.02)
    assert process.wait(timeout=60) == 75
    assert events(tmp_path / "run", "attempt_end")[-1]["exit_code"] == 75
    assert events(tmp_path / "run", "checkpoint")[-1]["step"] == max(losses(tmp_path / "run"))
