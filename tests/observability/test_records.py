"""The record survives what befalls files (crashes, full disks, short writes) and keeps floats exactly."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_titan.observability import records
from jax_titan.observability.records import (
    EVENTS,
    AttemptEnd,
    AttemptStart,
    Checkpoint,
    Compile,
    Eval,
    Event,
    Recorder,
    Step,
    read_events,
)

ENVELOPE = (
    "event",
    "version",
    "run_id",
    "attempt",
    "seq",
    "time_unix_seconds",
    "time_monotonic_seconds",
    "boot_id",
    "pid",
)

EXAMPLES: tuple[Event, ...] = (
    AttemptStart(
        resume_step=0,
        total_steps=300,
        layout="mpmd",
        stages=4,
        schedule="1f1b",
        microbatches=8,
        devices=8,
        platform="cpu",
        device_kind="cpu",
        jax_version="0.12.0",
        jaxlib_version="0.12.0",
        python_version="3.12.3",
        jax_titan_version="0.1.0",
        parameters=1_000_000,
        data_digest="d1",
        config_digest="c1",
        unigram_loss=5.5,
        command=["jax-titan", "train", "llama3-debug"],
    ),
    Compile(
        seconds=8.125,
        lower_seconds=1.0,
        partition_seconds=2.0,
        xla_seconds=5.0,
        fragments=8,
        transfers_per_step=48,
    ),
    Step(
        step=1,
        loss=5.25,
        grad_norm=1.5,
        learning_rate=3e-4,
        tokens=3072,
        step_seconds=0.25,
        data_wait_seconds=0.001,
    ),
    Eval(step=1, loss=5.125, tokens=512, bytes=2048, bits_per_byte=1.85, seconds=0.5),
    Checkpoint(step=1, seconds=0.25, bytes=4_000_000, path="checkpoints/1"),
    AttemptEnd(
        reason="ok",
        exit_code=0,
        step=1,
        host_peak_bytes=10**9,
        device_peak_bytes=[10**8, None],
        seconds=12.5,
        message=None,
    ),
)


def step_event(step: Any = 1, loss: Any = 1.0, grad_norm: Any = 1.0) -> Step:
    return Step(step=step, loss=loss, grad_norm=grad_norm, learning_rate=1e-3, tokens=8, step_seconds=0.1)


def test_the_examples_below_cover_every_event():
    assert tuple(type(event) for event in EXAMPLES) == EVENTS


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.event)
def test_every_event_is_one_strict_json_line_with_the_envelope_and_its_fields(tmp_path: Path, event: Event):
    with Recorder(tmp_path / "events.jsonl") as recorder:
        emitted = recorder.emit(event)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert list(record) == [*ENVELOPE, *(field.name for field in dataclasses.fields(event))]
    assert record["event"] == event.event
    assert record["version"] == 1
    assert record["pid"] == os.getpid()
    assert {name: record[name] for name in dataclasses.asdict(event)} == dataclasses.asdict(event)
    assert read_events(tmp_path / "events.jsonl") == [emitted]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_come_back_bit_for_bit(tmp_path: Path, dtype: type):
    bits = np.random.default_rng(0).integers(0, 2**63, 600, dtype=np.uint64)
    values = bits.view(dtype)
    values = values[np.isfinite(values)]
    assert len(values) > 500
    with Recorder(tmp_path / "events.jsonl") as recorder:
        for value in values:
            recorder.emit(step_event(loss=value, grad_norm=-float(value)))
    events = read_events(tmp_path / "events.jsonl")
    assert np.array([event["loss"] for event in events], dtype).tobytes() == values.tobytes()
    assert [event["grad_norm"] for event in events] == [-float(value) for value in values]


def test_non_finite_losses_are_strings_in_the_file_and_floats_for_the_reader(tmp_path: Path):
    with Recorder(tmp_path / "events.jsonl") as recorder:
        emitted = recorder.emit(step_event(loss=np.float32("nan"), grad_norm=math.inf))
        recorder.emit(step_event(loss=-math.inf))
        recorder.emit(AttemptEnd(reason="crash", exit_code=1, step=1, message="nan"))
    raw = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (raw[0]["loss"], raw[0]["grad_norm"], raw[1]["loss"]) == ("nan", "inf", "-inf")
    first, second, end = read_events(tmp_path / "events.jsonl")
    assert math.isnan(emitted["loss"])
    assert math.isnan(first["loss"])
    assert (first["grad_norm"], second["loss"]) == (math.inf, -math.inf)
    assert end["message"] == "nan", "a text field keeps its text"


def test_scalars_of_numpy_become_numbers_and_anything_else_is_refused_by_name(tmp_path: Path):
    with Recorder(tmp_path / "events.jsonl") as recorder:
        recorder.emit(step_event(np.int64(3), np.array(2.5), 1))
        with pytest.raises(TypeError, match=r"checkpoint\.path: object has no JSON form"):
            recorder.emit(Checkpoint(step=1, seconds=None, path=object()))  # pyright: ignore[reportArgumentType]
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["step"], event["loss"], event["grad_norm"]) == (3, 2.5, 1)


def test_one_write_an_event_and_a_sync_only_where_losing_it_would_mislead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    writes: list[bytes] = []
    synced: list[int] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: writes.append(bytes(data)) or write(file, data))
    monkeypatch.setattr(records, "_sync", synced.append)
    syncs_after = {}
    with Recorder(tmp_path / "events.jsonl") as recorder:
        for event in EXAMPLES:
            before = len(synced)
            recorder.emit(event)
            syncs_after[event.event] = len(synced) - before
    assert len(writes) == len(EXAMPLES)
    assert all(data.endswith(b"\n") and data.count(b"\n") == 1 for data in writes)
    assert {name for name, count in syncs_after.items() if count == 1} == {
        "attempt_start",
        "checkpoint",
        "attempt_end",
    }
    assert sum(syncs_after.values()) == 3


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    with Recorder(tmp_path / "events.jsonl") as recorder:
        emitted = [recorder.emit(event) for event in EXAMPLES]
    events = read_events(tmp_path / "events.jsonl")
    assert events == emitted
    assert events.unreadable_lines == 0


def test_a_full_disk_stops_no_training_and_tears_no_later_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write = os.write
    room = [10]  # bytes left on the disk

    def limited(file: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(file, data[: room[0]])
        room[0] -= count
        return count

    heard: list[int] = []
    with Recorder(tmp_path / "events.jsonl", listeners=[lambda event: heard.append(event["step"])]) as recorder:
        monkeypatch.setattr(os, "write", limited)
        for step in (1, 2, 3):
            recorder.emit(step_event(step))
        monkeypatch.setattr(os, "write", write)  # someone made room
        recorder.emit(step_event(4))
    assert recorder.write_failures == 3
    assert heard == [1, 2, 3, 4]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    events = read_events(tmp_path / "events.jsonl")
    assert [(event["step"], event["seq"]) for event in events] == [(4, 3)]
    assert events.unreadable_lines == 1


def test_a_write_that_writes_nothing_is_a_failure_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with Recorder(tmp_path / "events.jsonl") as recorder:
        monkeypatch.setattr(os, "write", lambda file, data: 0)
        recorder.emit(step_event())
    assert recorder.write_failures == 1


@pytest.mark.parametrize("cut", [1, 2, 20, 120])
def test_the_next_attempt_starts_on_its_own_line_after_a_torn_one(tmp_path: Path, cut: int):
    path = tmp_path / "events.jsonl"
    with Recorder(path) as first:
        kept = first.emit(step_event(1))
        torn = first.emit(step_event(2))
    path.write_bytes(path.read_bytes()[:-cut])
    with Recorder(path) as second:
        assert (second.run_id, second.attempt) == (first.run_id, 2)
        new = second.emit(step_event(2))
        newer = second.emit(step_event(3))
    events = read_events(path)
    whole = cut == 1  # only the newline was missing
    assert events == ([kept, torn, new, newer] if whole else [kept, new, newer])
    assert events.unreadable_lines == (0 if whole else 1)
    assert (new["seq"], newer["seq"]) == (0, 1)


def test_every_prefix_of_a_file_reads_as_its_whole_lines(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with Recorder(path) as recorder:
        emitted = [recorder.emit(event) for event in EXAMPLES]
    content = path.read_bytes()
    for size in random.Random(0).sample(range(len(content)), 200):
        path.write_bytes(content[:size])
        whole = content[:size].count(b"\n")
        assert read_events(path)[:whole] == emitted[:whole]


def test_garbage_is_counted_and_what_a_newer_version_wrote_is_kept(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    newer = {"event": "step", "version": 9, "loss": 1.5, "colour": "blue"}
    unknown = {"event": "heartbeat", "version": 2, "loss": "nan"}
    garbage = [b"\x00" * 64, b"\xff\xfe{", b"[1, 2]", b"7", b'{"step": 1}', b"[" * 100_000]
    lines = [json.dumps(newer).encode(), *garbage, b"", json.dumps(unknown).encode()]
    path.write_bytes(b"\n".join(lines) + b"\n")
    events = read_events(path)
    assert events == [newer, unknown]
    assert events.unreadable_lines == len(garbage)


def test_a_run_keeps_its_name_and_counts_its_attempts(tmp_path: Path):
    path = tmp_path / "run" / "events.jsonl"
    for attempt in (1, 2, 3):
        with Recorder(path, run_id="blue") as recorder:
            event = recorder.emit(step_event())
        assert (event["run_id"], event["attempt"], event["seq"]) == ("blue", attempt, 0)
    with pytest.raises(ValueError, match="holds run blue, not green"):
        Recorder(path, run_id="green")


def test_runs_without_a_given_name_get_different_ones(tmp_path: Path):
    with Recorder(tmp_path / "a.jsonl") as first, Recorder(tmp_path / "b.jsonl") as second:
        assert first.run_id != second.run_id


def test_a_listener_that_fails_is_dropped_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    heard = []

    def broken(event: dict) -> None:
        raise BrokenPipeError("gone")

    with Recorder(tmp_path / "events.jsonl", listeners=[broken, heard.append]) as recorder:
        emitted = [recorder.emit(step_event(step)) for step in (1, 2)]
    assert heard == emitted
    assert capsys.readouterr().err.splitlines() == [
        "jax-titan: a listener of the run's events failed and is dropped: BrokenPipeError: gone"
    ]


def test_a_closed_record_says_so(tmp_path: Path):
    recorder = Recorder(tmp_path / "events.jsonl")
    recorder.close()
    recorder.close()
    with pytest.raises(ValueError, match="the record is closed"):
        recorder.emit(step_event())


def test_the_room_imports_neither_jax_nor_other_rooms():
    modules = "console, env, records, summarize, units"
    code = (
        f"import sys; from jax_titan.observability import {modules}\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib') or "
        "name.startswith('jax_titan.') and not name.startswith('jax_titan.observability')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
