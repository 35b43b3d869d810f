"""Summaries of runs whose every figure is known in closed form, whole and broken ones."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jax_titan.observability.records import Recorder, Step, boot_id, to_json
from jax_titan.observability.summarize import format_summary, summarize

WALL_SECONDS = 1.7e9  # of the first event


class Run:
    """Writes the events of a made-up run, on clocks of its own."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.lines: list[str] = []
        self.attempt = 0
        self.pid = 2**22 + 1  # above the largest process id that Linux hands out
        self.boot_id: str | None = "boot"
        self.wall_seconds = WALL_SECONDS
        self.monotonic_seconds = 50.0

    def wait(self, seconds: float) -> Run:
        self.wall_seconds += seconds
        self.monotonic_seconds += seconds
        return self

    def event(self, name: str, **fields: Any) -> Run:
        envelope = {
            "event": name,
            "version": 1,
            "run_id": "run",
            "attempt": self.attempt,
            "seq": 0,
            "time_unix_seconds": self.wall_seconds,
            "time_monotonic_seconds": self.monotonic_seconds,
            "boot_id": self.boot_id,
            "pid": self.pid,
        }
        self.lines.append(to_json(envelope | fields))
        return self

    def start(self, resume_step: int = 0, total_steps: int = 10, **fields: Any) -> Run:
        self.attempt += 1
        facts = {
            "layout": "mpmd",
            "stages": 4,
            "schedule": "1f1b",
            "microbatches": 8,
            "devices": 8,
            "platform": "cpu",
            "device_kind": "cpu",
            "parameters": 1000,
            "unigram_loss": 5.5,
        }
        return self.event("attempt_start", resume_step=resume_step, total_steps=total_steps, **facts | fields)

    def step(self, step: int, seconds: float = 0.5, tokens: int = 100, **fields: Any) -> Run:
        self.wait(seconds)
        values = {"loss": 10.0 - step, "grad_norm": 1.0, "learning_rate": 1e-3, "step_seconds": seconds}
        return self.event("step", step=step, tokens=tokens, **values | fields)

    def eval(self, step: int, loss: float, bits_per_byte: float | None = None) -> Run:
        return self.event(
            "eval", step=step, loss=loss, tokens=10, bytes=40, bits_per_byte=bits_per_byte, seconds=0.1
        )

    def checkpoint(self, step: int) -> Run:
        return self.event("checkpoint", step=step, seconds=0.1, bytes=10, path=f"checkpoints/{step}")

    def end(self, reason: str = "ok", exit_code: int = 0, **fields: Any) -> Run:
        return self.event("attempt_end", reason=reason, exit_code=exit_code, **fields)

    def summary(self) -> dict[str, Any]:
        (self.run_dir / "events.jsonl").write_text("".join(line + "\n" for line in self.lines))
        summary = summarize(self.run_dir)
        format_summary(summary)  # whatever happened, it has a form
        to_json(summary)
        return summary


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_whole_run(run: Run):
    run.start(total_steps=4).event("compile", seconds=2.0, fragments=8, transfers_per_step=48)
    run.wait(3.0).eval(0, 6.0, 2.5)
    run.step(1, 5.0, 90).step(2, 0.5, 100).step(3, 0.25, 100).step(4, 1.0, 110).eval(4, 4.0, 1.75).checkpoint(4)
    run.wait(2.0).end(host_peak_bytes=10**9, device_peak_bytes=[5, None, 7], step=4)
    assert run.summary() == {
        "run_id": "run",
        "status": "complete",
        "exit_code": 0,
        "message": None,
        "steps": 4,
        "total_steps": 4,
        "unrecorded_steps": 0,
        "lost_steps": 0,
        "attempts": 1,
        "checkpoints": 1,
        "checkpoint_step": 4,
        "tokens": 400,
        "first_loss": 9.0,
        "last_loss": 6.0,
        "evaluations": 2,
        "first_eval_loss": 6.0,
        "last_eval_loss": 4.0,
        "bits_per_byte": 1.75,
        "unigram_loss": 5.5,
        "tokens_per_second": 200.0,  # of 200, 400 and 110; the first step, 18, compiled
        "step_seconds_median": 0.5,
        "time_to_first_step_seconds": 8.0,
        "compile_seconds": 2.0,
        "wall_seconds": 11.75,
        "host_peak_bytes": 10**9,
        "device_peak_bytes": 7,
        "layout": "mpmd",
        "stages": 4,
        "schedule": "1f1b",
        "microbatches": 8,
        "devices": 8,
        "platform": "cpu",
        "device_kind": "cpu",
        "parameters": 1000,
        "unreadable_lines": 0,
    }


def test_work_after_the_resumed_step_is_replaced_and_counted_as_lost(run: Run):
    run.start().step(1).step(2).eval(2, 5.0).checkpoint(2).step(3, tokens=7, loss=70.0).step(4).eval(4, 3.0)
    run.wait(60.0).start(resume_step=2)
    lost = run.summary()
    assert (lost["steps"], lost["tokens"], lost["lost_steps"], lost["last_eval_loss"]) == (2, 200, 2, 5.0)
    assert lost["last_loss"] == 8.0
    run.step(3, 2.0).step(4, 0.25, loss=1.25).eval(4, 2.0).step(5, 0.25).end()
    summary = run.summary()
    assert (summary["attempts"], summary["steps"], summary["lost_steps"]) == (2, 5, 2)
    assert summary["tokens"] == 500, "every surviving step once"
    assert (summary["first_loss"], summary["last_loss"]) == (9.0, 5.0)
    assert (summary["first_eval_loss"], summary["last_eval_loss"]) == (5.0, 2.0)
    # Step 2 of the first attempt (200 a second), steps 4 and 5 of the second; never the first of either.
    assert summary["tokens_per_second"] == 400.0
    assert summary["step_seconds_median"] == 0.25
    assert summary["wall_seconds"] == 4 * 0.5 + 60.0 + 2.5


def test_a_run_that_starts_over_keeps_nothing(run: Run):
    run.start().step(1).step(2).checkpoint(2).start(resume_step=0).step(1, loss=3.0)
    summary = run.summary()
    assert (summary["steps"], summary["tokens"], summary["lost_steps"]) == (1, 100, 2)
    assert (summary["first_loss"], summary["last_loss"], summary["checkpoint_step"]) == (3.0, 3.0, None)
    assert summary["checkpoints"] == 1, "the save was made all the same"


def test_a_replay_is_seen_even_where_the_line_that_told_of_it_was_torn(run: Run):
    run.start().step(1).step(2).step(3)
    run.start(resume_step=1)
    run.lines[-1] = run.lines[-1][:40]
    run.step(2, loss=1.5)
    summary = run.summary()
    assert (summary["steps"], summary["tokens"], summary["lost_steps"]) == (2, 200, 2)
    assert (summary["last_loss"], summary["unreadable_lines"], summary["attempts"]) == (1.5, 1, 2)


def test_a_step_whose_line_was_torn_is_counted_but_not_guessed(run: Run):
    run.start().step(1).step(2).step(3).end()
    run.lines[2] = run.lines[2][:-5]
    summary = run.summary()
    assert (summary["steps"], summary["unrecorded_steps"], summary["tokens"]) == (3, 1, 200)
    assert summary["unreadable_lines"] == 1


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_short_runs_have_no_more_figures_than_they_measured(run: Run, steps: int):
    run.start(total_steps=steps)
    for step in range(1, steps + 1):
        run.step(step)
    summary = run.end().summary()
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("complete", steps, 100 * steps)
    assert summary["first_loss"] == (9.0 if steps else None)
    assert summary["last_loss"] == (10.0 - steps if steps else None)
    assert summary["tokens_per_second"] == (200.0 if steps == 2 else None)
    assert summary["step_seconds_median"] == (0.5 if steps == 2 else None)
    assert summary["time_to_first_step_seconds"] == (0.5 if steps else None)
    assert summary["bits_per_byte"] is None


def test_an_attempt_that_only_resumed_stands_at_its_step(run: Run):
    summary = run.start(resume_step=7).summary()
    assert (summary["steps"], summary["unrecorded_steps"], summary["tokens"]) == (7, 7, 0)


def test_unmeasured_times_and_values_stay_null(run: Run):
    run.start(unigram_loss=None).step(1).step(2, step_seconds=None).step(3, step_seconds=None, loss=None)
    summary = run.end(host_peak_bytes=None, device_peak_bytes=None).summary()
    for name in (
        "tokens_per_second",
        "step_seconds_median",
        "host_peak_bytes",
        "device_peak_bytes",
        "compile_seconds",
    ):
        assert summary[name] is None
    assert summary["unigram_loss"] is None
    assert "not measured" in format_summary(summary)


def test_losses_that_are_not_finite_reach_the_summary(run: Run):
    summary = run.start().step(1, loss=math.inf).step(2, loss=math.nan).end("crash", 1).summary()
    assert summary["first_loss"] == math.inf
    assert math.isnan(summary["last_loss"])
    assert json.loads(to_json(summary))["last_loss"] == "nan"
    assert "inf -> nan" in format_summary(summary)


@pytest.mark.parametrize(
    ("reason", "exit_code", "saved", "status"),
    [
        ("ok", 0, True, "complete"),
        ("stop_after", 0, True, "stopped, resumable at step 2"),
        ("sigterm", 75, True, "stopped, resumable at step 2"),
        ("sigint", 75, False, "stopped, no checkpoint"),
        ("crash", 1, True, "died"),
    ],
)
def test_the_status_of_an_ended_attempt(run: Run, reason: str, exit_code: int, saved: bool, status: str):
    run.start().step(1).step(2)
    if saved:
        run.checkpoint(2)
    summary = run.step(3).end(reason, exit_code).summary()
    assert (summary["status"], summary["exit_code"]) == (status, exit_code)
    assert ("resumable at step 2" in format_summary(summary)) == (saved and reason != "ok")


def test_a_killed_run_has_died_and_a_living_one_may_be_running(run: Run):
    run.boot_id = boot_id()
    if run.boot_id is None:
        pytest.skip("this system does not name its boots")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        run.pid = child.pid
        run.start().step(1)
        assert run.summary()["status"] == "running?"
    finally:
        child.kill()
        child.communicate()
    assert run.summary()["status"] == "died"
    assert run.summary()["exit_code"] is None


@pytest.mark.parametrize(("silence_seconds", "status"), [(30.0, "running?"), (3600.0, "died")])
def test_a_run_of_another_machine_is_judged_by_its_silence(run: Run, silence_seconds: float, status: str):
    run.boot_id, run.pid = "elsewhere", os.getpid()
    run.wall_seconds = time.time() - silence_seconds
    assert run.start().summary()["status"] == status


def test_clocks_that_jump_back_give_no_negative_time(run: Run):
    run.start()
    run.wall_seconds -= 10_000  # someone set the clock; the monotonic one goes on
    run.step(1, 4.0).step(2, 1.0)
    run.wall_seconds -= 500
    run.boot_id, run.monotonic_seconds, run.pid = "after a reboot", 3.0, run.pid - 1
    run.start(resume_step=2).step(3, 2.0).end()
    summary = run.summary()
    assert summary["time_to_first_step_seconds"] == 4.0
    assert summary["wall_seconds"] == 5.0 + 0.0 + 2.0


def test_gaps_between_attempts_are_told_by_the_wall_clock(run: Run):
    run.boot_id = None  # not every system names its boots
    run.start().step(1, 4.0).wait(60.0)
    run.monotonic_seconds = 3.0
    run.start(resume_step=1).step(2, 2.0)
    assert run.summary()["wall_seconds"] == 4.0 + 60.0 + 2.0


def test_compile_time_is_that_of_the_latest_attempt_that_measured_it(run: Run):
    parts = {"fragments": 8, "transfers_per_step": 48}
    run.start().event("compile", seconds=9.0, **parts)
    run.start().event("compile", seconds=3.0, **parts).event("compile", seconds=1.0, **parts)
    run.start().event("compile", seconds=None, **parts)
    assert run.summary()["compile_seconds"] == 4.0


def test_an_empty_record_is_a_run_of_nothing(run: Run):
    summary = run.summary()
    assert (summary["status"], summary["steps"], summary["attempts"], summary["tokens"]) == (
        "nothing recorded",
        0,
        0,
        0,
    )
    assert summary["wall_seconds"] is None


def test_a_directory_that_holds_no_run_is_named_in_one_line(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="absent: no such run directory") as missing:
        summarize(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"holds no events\.jsonl") as empty:
        summarize(tmp_path)
    assert not any("\n" in str(error.value) for error in (missing, empty))


def test_losses_are_those_of_the_recorder_to_the_last_bit(tmp_path: Path):
    losses = [math.pi, math.e / 3, 1 / 3]
    with Recorder(tmp_path / "events.jsonl") as recorder:
        for number, loss in enumerate(losses, 1):
            recorder.emit(
                Step(step=number, loss=loss, grad_norm=1.0, learning_rate=1e-3, tokens=1, step_seconds=0.1)
            )
    summary = summarize(tmp_path)
    assert (summary["first_loss"], summary["last_loss"]) == (losses[0], losses[-1])


def test_the_table_reads_with_units(run: Run):
    run.start(total_steps=4, parameters=1_234_567).step(1).step(2, tokens=12_345).checkpoint(2).step(3)
    run.wait(1.0).start(resume_step=2, total_steps=4, parameters=1_234_567).step(3).end("sigterm", 75)
    rows = dict(line.split("  ", 1) for line in format_summary(run.summary()).splitlines())
    texts = {label: text.strip() for label, text in rows.items()}
    assert texts["status"] == "stopped, resumable at step 2 (exit code 75)"
    assert texts["steps"] == "3 of 4; 1 more lost to restarts"
    assert texts["tokens"] == "12,545"
    assert texts["train loss"] == "9.0000 -> 7.0000 nats/token"
    assert texts["eval loss"] == "not measured"
    assert texts["throughput"] == "24,690 tokens/s (median)"
    assert texts["parameters"] == "1,234,567"
    assert texts["layout"] == "mpmd, 4 stages, 1f1b, 8 microbatches"
    assert texts["host memory"] == "not measured"
    assert texts["devices"] == "8 x cpu (cpu)"
