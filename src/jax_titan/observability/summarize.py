"""What happened in a run, from its events alone. Every step counts once: when an attempt resumes at step k,
what earlier attempts did after step k is lost work and leaves every figure but `lost_steps`, `checkpoints`
(saves made) and the wall time.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jax_titan.observability.records import EVENTS_FILE, boot_id, read_events
from jax_titan.observability.units import bytes_text, count_text, seconds_text, significant_text

# An unfinished run on another machine, whose processes cannot be seen from here, passes for alive this long.
SILENCE_OF_THE_DEAD_SECONDS = 600.0

Event = dict[str, Any]


def summarize(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a run's events and adds them up.

    Throughput and step time are medians over surviving steps without the first step of each attempt, which
    may contain compilation. Durations inside an attempt come from the monotonic clock; only the gaps between
    attempts come from the wall clock, and count as zero where it jumped back.

    Args:
        run_dir: a run directory, which holds `events.jsonl`.

    Returns:
        One flat dictionary; None is "not measured". Losses are those of the events, unchanged.

    Raises:
        FileNotFoundError: there is no such directory, or it holds no events.
    """
    path = Path(run_dir) / EVENTS_FILE
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{run_dir}: no such run directory")
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir}: holds no {EVENTS_FILE}; not a run directory, or nothing was recorded")
    events = read_events(path)
    attempts = _attempts(events)
    work = _surviving(events)
    start = _last(events, "attempt_start")
    end = _last(attempts[-1], "attempt_end") if attempts else {}
    steps = max([*work.steps, work.resume_step])
    losses = _values(work.steps, "loss")
    eval_losses = _values(work.evals, "loss")
    steady = [step for step in work.steps.values() if step is not work.first_step_of.get(step.get("attempt"))]
    checkpoint_step = max(work.checkpoints, default=None)
    return {
        "run_id": events[-1].get("run_id") if events else None,
        "status": _status(attempts, checkpoint_step),
        "exit_code": end.get("exit_code"),
        "message": end.get("message"),
        "steps": steps,
        "total_steps": start.get("total_steps"),
        "unrecorded_steps": steps - len(work.steps),
        "lost_steps": work.lost_steps,
        "attempts": len(attempts),
        "checkpoints": sum(event["event"] == "checkpoint" for event in events),
        "checkpoint_step": checkpoint_step,
        "tokens": sum(_values(work.steps, "tokens")),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "evaluations": len(eval_losses),
        "first_eval_loss": eval_losses[0] if eval_losses else None,
        "last_eval_loss": eval_losses[-1] if eval_losses else None,
        "bits_per_byte": work.evals[max(work.evals)].get("bits_per_byte") if work.evals else None,
        "unigram_loss": start.get("unigram_loss"),
        "tokens_per_second": _median(
            step["tokens"] / step["step_seconds"]
            for step in steady
            if step.get("step_seconds") and step.get("tokens") is not None
        ),
        "step_seconds_median": _median(
            step["step_seconds"] for step in steady if step.get("step_seconds") is not None
        ),
        "time_to_first_step_seconds": _time_to_first_step_seconds(attempts),
        "compile_seconds": _compile_seconds(attempts),
        "wall_seconds": _wall_seconds(attempts),
        "host_peak_bytes": _host_peak_bytes(events),
        "device_peak_bytes": _device_peak_bytes(events),
        "layout": start.get("layout"),
        "stages": start.get("stages"),
        "schedule": start.get("schedule"),
        "microbatches": start.get("microbatches"),
        "devices": start.get("devices"),
        "platform": start.get("platform"),
        "device_kind": start.get("device_kind"),
        "parameters": start.get("parameters"),
        "unreadable_lines": events.unreadable_lines,
    }


@dataclasses.dataclass
class _Work:
    """What of a run's work is still standing, as its events are read one by one."""

    steps: dict[int, Event] = dataclasses.field(default_factory=dict)
    evals: dict[int, Event] = dataclasses.field(default_factory=dict)
    checkpoints: dict[int, Event] = dataclasses.field(default_factory=dict)
    first_step_of: dict[Any, Event] = dataclasses.field(default_factory=dict)  # by attempt
    resume_step: int = 0  # of the latest attempt
    lost_steps: int = 0

    def add(self, event: Event) -> None:
        match event:
            case {"event": "attempt_start", "resume_step": int(step)}:
                self.resume_step = step
                self.rewind(step)
            case {"event": "step", "step": int(step)}:
                # A no-op, unless the line that told of the resume was torn.
                self.rewind(step - 1)
                self.steps[step] = event
                self.first_step_of.setdefault(event.get("attempt"), event)
            case {"event": "eval", "step": int(step)}:
                self.evals[step] = event
            case {"event": "checkpoint", "step": int(step)}:
                self.checkpoints[step] = event

    def rewind(self, last_step: int) -> None:
        """Drops what was done after `last_step`."""
        for done in (self.steps, self.evals, self.checkpoints):
            for step in [step for step in done if step > last_step]:
                del done[step]
                self.lost_steps += done is self.steps


def _surviving(events: Iterable[Event]) -> _Work:
    work = _Work()
    for event in events:
        work.add(event)
    return work


def _attempts(events: Iterable[Event]) -> list[list[Event]]:
    """The events of each attempt, in the order of the file."""
    attempts: dict[Any, list[Event]] = {}
    for event in events:
        attempts.setdefault(event.get("attempt"), []).append(event)
    return list(attempts.values())


def _last(events: Iterable[Event], name: str) -> Event:
    """The last event of that name, or an empty one."""
    found: Event = {}
    for event in events:
        if event["event"] == name:
            found = event
    return found


def _values(done: dict[int, Event], name: str) -> list[Any]:
    """One field of recorded work, in the order of steps, where it was measured."""
    return [done[step][name] for step in sorted(done) if done[step].get(name) is not None]


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _elapsed_seconds(first: Event, last: Event) -> float | None:
    """From one event to a later one, never negative: wall clocks are set back, and monotonic ones restart."""
    same_clock = all(first.get(key) == last.get(key) for key in ("attempt", "boot_id", "pid"))
    clock = "time_monotonic_seconds" if same_clock else "time_unix_seconds"
    begin, end = first.get(clock), last.get(clock)
    if begin is None or end is None:
        return None
    return max(0.0, end - begin)


def _wall_seconds(attempts: list[list[Event]]) -> float | None:
    """From the first event to the last, summed over attempts and gaps: a bad gap does not spoil the rest."""
    spans = [(attempt[0], attempt[-1]) for attempt in attempts]
    gaps = [(before[-1], after[0]) for before, after in itertools.pairwise(attempts)]
    seconds = [_elapsed_seconds(first, last) for first, last in spans + gaps]
    measured = [value for value in seconds if value is not None]
    return sum(measured) if measured else None


def _time_to_first_step_seconds(attempts: list[list[Event]]) -> float | None:
    """From the start of the first attempt to the end of its first step, if it got that far."""
    if not attempts:
        return None
    start = next((event for event in attempts[0] if event["event"] == "attempt_start"), None)
    step = next((event for event in attempts[0] if event["event"] == "step"), None)
    return _elapsed_seconds(start, step) if start and step else None


def _compile_seconds(attempts: list[list[Event]]) -> float | None:
    """All compilation of the latest attempt that measured any."""
    for attempt in reversed(attempts):
        seconds = [event["seconds"] for event in attempt if event["event"] == "compile" and event.get("seconds")]
        if seconds:
            return sum(seconds)
    return None


def _host_peak_bytes(events: Iterable[Event]) -> int | None:
    """The largest of any attempt that lived to tell."""
    peaks = [event.get("host_peak_bytes") for event in events if event["event"] == "attempt_end"]
    return max((peak for peak in peaks if peak is not None), default=None)


def _device_peak_bytes(events: Iterable[Event]) -> int | None:
    """That of the fullest device in any attempt that lived to tell."""
    lists = [event.get("device_peak_bytes") or [] for event in events if event["event"] == "attempt_end"]
    return max((peak for peaks in lists for peak in peaks if peak is not None), default=None)


def _status(attempts: list[list[Event]], checkpoint_step: int | None) -> str:
    if not attempts:
        return "nothing recorded"
    end = _last(attempts[-1], "attempt_end")
    if not end:
        return "running?" if _may_be_alive(attempts[-1][-1]) else "died"
    if end.get("reason") == "ok":
        return "complete"
    if end.get("exit_code") not in (0, 75):  # 75: stopped early on purpose, resumable
        return "died"
    return "stopped, no checkpoint" if checkpoint_step is None else f"stopped, resumable at step {checkpoint_step}"


def _may_be_alive(last_event: Event) -> bool:
    pid, boot = last_event.get("pid"), last_event.get("boot_id")
    if isinstance(pid, int) and boot is not None and boot == boot_id():
        try:
            os.kill(pid, 0)  # sends nothing; asks whether there is such a process
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    silence_seconds = time.time() - last_event.get("time_unix_seconds", 0.0)
    return silence_seconds < SILENCE_OF_THE_DEAD_SECONDS


def format_summary(summary: dict[str, Any]) -> str:
    """The summary as a table for people, with units; "not measured" for None."""
    show = _Shower(summary)
    rows = [
        ("run", show("run_id", str)),
        ("status", _status_text(summary)),
        ("steps", _steps_text(summary)),
        ("attempts", show("attempts", count_text)),
        ("checkpoints", show("checkpoints", count_text)),
        ("tokens", show("tokens", count_text)),
        ("train loss", _course_text(summary, "first_loss", "last_loss", summary["steps"])),
        ("eval loss", _course_text(summary, "first_eval_loss", "last_eval_loss", summary["evaluations"])),
        ("unigram loss", show("unigram_loss", _loss_text, "nats/token")),
        ("bits per byte", show("bits_per_byte", _loss_text)),
        ("throughput", show("tokens_per_second", significant_text, "tokens/s (median)")),
        ("step time", show("step_seconds_median", seconds_text, "(median)")),
        ("time to first step", show("time_to_first_step_seconds", seconds_text)),
        ("compile time", show("compile_seconds", seconds_text)),
        ("wall time", show("wall_seconds", seconds_text)),
        ("host memory", show("host_peak_bytes", bytes_text, "at peak")),
        ("device memory", show("device_peak_bytes", bytes_text, "at peak, fullest device")),
        ("parameters", show("parameters", count_text)),
        ("layout", _layout_text(summary)),
        ("devices", f"{show('devices', count_text)} x {show('device_kind', str)} ({show('platform', str)})"),
    ]
    if summary["message"]:
        rows.insert(2, ("message", summary["message"]))
    if summary["unreadable_lines"]:
        rows.append(("unreadable lines", f"{count_text(summary['unreadable_lines'])} in {EVENTS_FILE}"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


def _course_text(summary: dict[str, Any], first: str, last: str, count: int) -> str:
    """From the first to the last value; a single one is no course."""
    show = _Shower(summary)
    if count < 2:
        return show(last, _loss_text, "nats/token")
    return f"{show(first, _loss_text)} -> {show(last, _loss_text)} nats/token"


@dataclasses.dataclass(frozen=True)
class _Shower:
    summary: dict[str, Any]

    def __call__(self, name: str, form: Callable[[Any], str], unit: str = "") -> str:
        value = self.summary[name]
        return "not measured" if value is None else f"{form(value)} {unit}".rstrip()


def _loss_text(loss: float) -> str:
    return f"{loss:.4f}"


def _status_text(summary: dict[str, Any]) -> str:
    text = summary["status"]
    if summary["exit_code"] is not None:
        text += f" (exit code {summary['exit_code']})"
    if text.startswith("died") and summary["checkpoint_step"] is not None:
        text += f"; resumable at step {summary['checkpoint_step']}"
    return text


def _steps_text(summary: dict[str, Any]) -> str:
    total = summary["total_steps"]
    text = count_text(summary["steps"]) + (f" of {count_text(total)}" if total is not None else "")
    if summary["lost_steps"]:
        text += f"; {count_text(summary['lost_steps'])} more lost to restarts"
    if summary["unrecorded_steps"]:
        text += f"; {count_text(summary['unrecorded_steps'])} without a record"
    return text


def _layout_text(summary: dict[str, Any]) -> str:
    parts = [summary["layout"] or "not measured"]
    for name, singular in (("stages", "stage"), ("microbatches", "microbatch")):
        count = summary[name]
        if count is not None:
            parts.append(f"{count_text(count)} {singular if count == 1 else name}")
    if summary["schedule"]:
        parts.insert(2, summary["schedule"])
    return ", ".join(parts)
