"""The console tells a person enough, a log file not too much, and leaves a terminal as it found it."""

from __future__ import annotations

import errno
import io
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jax_titan.observability.console import Console
from jax_titan.observability.records import Recorder, Step

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class BrokenStream(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "the terminal is gone")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    return Terminal()


def step(number: int, seconds: float = 0.248, **fields: Any) -> dict[str, Any]:
    event = {
        "event": "step",
        "time_monotonic_seconds": 100.0 + number * seconds,
        "step": number,
        "loss": 4.812,
        "grad_norm": 1.03,
        "learning_rate": 1e-3,
        "tokens": 12_345 * 0.248,
        "step_seconds": seconds,
    }
    return event | fields


def start(**fields: Any) -> dict[str, Any]:
    event = {
        "event": "attempt_start",
        "attempt": 1,
        "resume_step": 0,
        "total_steps": 300,
        "layout": "mpmd",
        "stages": 4,
        "schedule": "1f1b",
        "microbatches": 8,
        "platform": "cpu",
        "devices": 8,
        "parameters": 1_234_567,
    }
    return event | fields


def shown(events: list[dict[str, Any]] | Iterator[dict[str, Any]], total_steps: int = 300) -> list[str]:
    stream = io.StringIO()
    with Console(total_steps, stream) as console:
        for event in events:
            console.show(event)
    return stream.getvalue().splitlines()


def test_a_step_is_one_readable_line():
    assert shown([step(50)]) == ["step   50/300  loss 4.812  grad norm 1.03  12,345 tokens/s  248 ms"]


def test_numbers_of_a_column_end_under_each_other():
    lines = shown([step(1, loss=10.25, grad_norm=0.5), step(2, loss=9.5, step_seconds=0.5), step(3)])
    for unit in ("grad norm", "tokens/s"):
        assert len({line.index(unit) for line in lines}) == 1
    assert len({len(line) for line in lines}) == 1


def test_the_story_of_a_run_in_plain_lines():
    assert shown(
        [
            start(),
            {"event": "compile", "seconds": 8.1, "fragments": 8, "transfers_per_step": 48},
            step(1),
            {
                "event": "eval",
                "step": 50,
                "loss": 4.7,
                "tokens": 65_536,
                "bits_per_byte": 1.7016,
                "seconds": 1.25,
            },
            {
                "event": "checkpoint",
                "step": 50,
                "seconds": 0.42,
                "bytes": 12_300_000,
                "path": "checkpoints/50",
            },
            {"event": "attempt_end", "reason": "ok", "step": 300, "seconds": 81.2, "message": None},
            {"event": "of the future", "step": 301},
        ]
    ) == [
        "1,234,567 parameters, mpmd, 4 stages 1f1b, 8 microbatches, 8 cpu devices",
        "4 stages compiled in 8.10 s: 8 fragments, 6 transfers a microbatch",
        "step    1/300  loss 4.812  grad norm 1.03  12,345 tokens/s  248 ms",
        "eval   50/300  loss 4.700  1.702 bits/byte  65,536 tokens  1.25 s",
        "save   50/300  12.3 MB  420 ms  checkpoints/50",
        "done after step 300/300 in 81.2 s",
    ]


def test_what_was_not_measured_is_a_dash_or_left_out():
    lines = shown(
        [
            start(stages=1, schedule=None, microbatches=1, devices=1, attempt=2, resume_step=40, layout="spmd"),
            {"event": "compile", "seconds": None, "fragments": 1, "transfers_per_step": 0},
            step(41, step_seconds=None),
            {"event": "checkpoint", "step": 50, "seconds": None, "bytes": None, "path": "checkpoints/50"},
            {
                "event": "attempt_end",
                "reason": "sigterm",
                "step": 50,
                "seconds": None,
                "message": "asked to stop",
            },
        ]
    )
    assert lines == [
        "1,234,567 parameters, spmd, 1 cpu device",
        "attempt 2 resumes after step 40",
        "compiled in -",
        "step   41/300  loss 4.812  grad norm 1.03  - tokens/s  -",
        "save   50/300  checkpoints/50",
        "ended (sigterm) after step 50/300: asked to stop",
    ]


def test_transfers_that_are_no_multiple_of_the_microbatches_are_told_by_step():
    compiled = {"event": "compile", "seconds": 8.1, "fragments": 8, "transfers_per_step": 51}
    assert shown([start(), compiled])[1].endswith("8 fragments, 51 transfers a step")


def test_a_loss_that_is_not_finite_is_told_once():
    lines = shown([step(n, seconds=0.001, loss=math.nan, grad_norm=math.inf) for n in range(1, 101)], 1000)
    assert [line for line in lines if " is nan" in line] == ["step 1: loss is nan and grad norm is inf"]


@pytest.mark.parametrize("seconds", [0.0005, 0.1, 0.5, 5.0])
def test_a_log_of_10000_steps_is_short_yet_never_silent_for_long(seconds: float):
    lines = shown((step(n, seconds) for n in range(1, 10_001)), 10_000)
    numbers = [int(line.split("/")[0].split()[1]) for line in lines]
    assert numbers[:3] == [1, 2, 3]
    assert numbers[-1] == 10_000
    gaps = [after - before for before, after in itertools.pairwise(numbers)]
    assert max(gaps) <= 1000
    if max(gaps) < 1000:  # not yet a tenth of the run
        assert max(gaps) * seconds <= 60 + seconds
    run_seconds = 10_000 * seconds
    # The first three and the last, ten tenths, round numbers, and one a minute.
    assert len(lines) <= 4 + 10 + 50 + run_seconds / 60
    # Apart from those that the tenths ask for, at most one line in two seconds.
    assert len(lines) <= 14 + run_seconds / 2


def test_lines_fall_on_round_steps():
    lines = shown((step(n, 0.1) for n in range(1, 10_001)), 10_000)
    numbers = [int(line.split("/")[0].split()[1]) for line in lines]
    assert all(number % 200 == 0 for number in numbers[3:])


def test_a_short_run_shows_every_step():
    assert len(shown([step(n, 0.001) for n in range(1, 11)], 10)) == 10


def test_a_terminal_gets_a_live_line_with_notable_events_above(terminal: Terminal):
    with Console(300, terminal) as console:
        console.show(start())
        for number in (1, 2, 3):
            console.show(step(number, 1.0))
        console.show(
            {"event": "eval", "step": 3, "loss": 4.7, "tokens": 8, "bits_per_byte": None, "seconds": None}
        )
        console.note("a note with [brackets]")
    text = terminal.getvalue()
    assert "eval    3/300  loss 4.700" in text
    assert "a note with [brackets]" in text
    assert "step    3/300" in text
    assert "ETA 4 min 57 s" in text, "297 steps at the pace of 1 s"


def test_a_narrow_terminal_still_shows_every_figure(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    with Console(300, terminal) as console:
        console.show(step(1))
        console.show(step(2))
    assert "grad norm 1.03  12,345 tokens/s  248 ms  ETA 73.9 s" in terminal.getvalue()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_the_terminal_with_its_cursor(terminal: Terminal, error: type[BaseException]):
    def train() -> None:
        with Console(300, terminal) as console:
            console.show(step(1))
            assert terminal.getvalue().count(HIDE_CURSOR) == 1
            raise error

    with pytest.raises(error):
        train()
    assert terminal.getvalue().rindex(SHOW_CURSOR) > terminal.getvalue().rindex(HIDE_CURSOR)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_lost_stream_ends_the_display_and_not_the_training(monkeypatch: pytest.MonkeyPatch, is_terminal: bool):
    stream = BrokenStream()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    with Console(300, stream) as console:
        console.note("hello")
        console.show(step(1))
        console.show(step(2))


def test_a_console_listens_to_a_recorder(tmp_path: Path):
    stream = io.StringIO()
    with (
        Console(10, stream) as console,
        Recorder(tmp_path / "events.jsonl", listeners=[console.show]) as recorder,
    ):
        recorder.emit(Step(step=1, loss=2.0, grad_norm=0.5, learning_rate=1e-3, tokens=100, step_seconds=0.1))
    assert stream.getvalue() == "step   1/10  loss 2.000  grad norm 0.500  1,000 tokens/s  100 ms\n"
