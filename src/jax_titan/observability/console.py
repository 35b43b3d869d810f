"""A run's progress for the person at the screen: a reader of its events, made to listen to its `Recorder`.

On a terminal one live line follows the steps and notable events scroll by above it. Elsewhere (a file, a
pipe, a job's log) there are plain lines: every evaluation and checkpoint, and as many steps as a log bears.

    step   50/300  loss 4.812  grad norm 1.03  12,345 tokens/s  248 ms
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any, TextIO

import rich.console
import rich.progress

from jax_titan.observability.units import bytes_text, count_text, seconds_text, significant_text

FIRST_STEPS = 3  # shown of every attempt, so that a bad start is seen at once
QUIET_SECONDS = 2.0  # between plain lines, unless a tenth of the run has passed
LONGEST_SILENCE_SECONDS = 60.0
LINES_PER_RUN = 50  # steps shown on round numbers, about so many
WIDTH_WITH_BAR = 110  # characters; narrower terminals need them for the figures


class Console:
    """Shows events as they come. Use it as a context manager: an error then leaves the terminal whole.

    A stream that fails (a closed pipe, a lost terminal) ends the display, not the training.

    Args:
        total_steps: of the run; an `attempt_start` event may correct it.
        stream: where to write; standard output by default.
    """

    def __init__(self, total_steps: int, stream: TextIO | None = None):
        self._total_steps = total_steps
        # A process may have been started without any standard output.
        self._stream: TextIO = stream or sys.stdout or open(os.devnull, "w")  # noqa: SIM115
        self._rich = rich.console.Console(file=self._stream)
        self._is_terminal = self._stream.isatty() and not self._rich.is_dumb_terminal
        self._live: tuple[rich.progress.Progress, rich.progress.TaskID] | None = None
        self._lost = False
        self._column_widths: dict[str, int] = {}
        self._start_attempt({})

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, event: dict[str, Any]) -> None:
        """Shows one event, as a `Recorder` or `read_events` gives it; ignores unknown ones."""
        show = {
            "attempt_start": self._show_start,
            "compile": self._show_compile,
            "step": self._show_step,
            "eval": self._show_eval,
            "checkpoint": self._show_checkpoint,
            "attempt_end": self._show_end,
        }.get(event["event"])
        if show is not None:
            show(event)

    def note(self, text: str) -> None:
        """Prints a line of its own, above the live line if there is one."""
        if self._lost:
            return
        try:
            if self._is_terminal:
                self._rich.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=self._stream, flush=True)
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._lost = True

    def close(self) -> None:
        """Ends the live line and gives the terminal its cursor back; a second call does nothing."""
        if self._live is None:
            return
        (progress, _), self._live = self._live, None
        try:
            progress.stop()
        except (OSError, ValueError):
            self._lost = True

    # What each event says.

    def _show_start(self, event: dict[str, Any]) -> None:
        self._total_steps = event.get("total_steps") or self._total_steps
        self._start_attempt(event)
        stages, microbatches, devices = (event.get(name) or 1 for name in ("stages", "microbatches", "devices"))
        parts = [
            _with("parameters", count_text, event.get("parameters")),
            event.get("layout"),
            f"{stages} stages {event.get('schedule') or ''}".rstrip() if stages > 1 else None,
            f"{microbatches} microbatches" if microbatches > 1 else None,
            f"{devices} {event.get('platform') or 'unnamed'} device{'s' if devices > 1 else ''}",
        ]
        self.note(", ".join(part for part in parts if part))
        if event.get("resume_step"):
            self.note(f"attempt {event.get('attempt')} resumes after step {event['resume_step']}")

    def _show_compile(self, event: dict[str, Any]) -> None:
        stages, microbatches = self._attempt.get("stages") or 1, self._attempt.get("microbatches") or 0
        fragments, transfers = event.get("fragments") or 0, event.get("transfers_per_step") or 0
        subject = f"{stages} stages compiled" if stages > 1 else "compiled"
        text = f"{subject} in {_text(seconds_text, event.get('seconds'))}"
        if fragments > 1:
            # Transfers of the update, where there are any, belong to no microbatch.
            if microbatches and transfers % microbatches == 0:
                text += f": {fragments} fragments, {transfers // microbatches} transfers a microbatch"
            else:
                text += f": {fragments} fragments, {transfers} transfers a step"
        self.note(text)

    def _show_step(self, event: dict[str, Any]) -> None:
        step, now_seconds = event["step"], event["time_monotonic_seconds"]
        if self._first_step is None:
            self._first_step = (step, now_seconds)
        self._steps_seen += 1
        self._warn_if_not_finite(event)
        if self._is_terminal:
            self._move_live_line(event)
        elif self._line_is_due(step, now_seconds):
            self._last_line = (step, now_seconds)
            self.note("  ".join([self._prefix("step", step), *self._figures(event)]))

    def _show_eval(self, event: dict[str, Any]) -> None:
        parts = [
            f"loss {self._column('loss', f'{_number(event.get("loss")):.3f}')}",
            _with("bits/byte", lambda bits: f"{bits:.3f}", event.get("bits_per_byte")),
            _with("tokens", count_text, event.get("tokens")),
            _with("", seconds_text, event.get("seconds")),
        ]
        self.note("  ".join([self._prefix("eval", event.get("step")), *(part for part in parts if part)]))

    def _show_checkpoint(self, event: dict[str, Any]) -> None:
        parts = [
            _with("", bytes_text, event.get("bytes")),
            _with("", seconds_text, event.get("seconds")),
            event.get("path"),
        ]
        self.note("  ".join([self._prefix("save", event.get("step")), *(part for part in parts if part)]))

    def _show_end(self, event: dict[str, Any]) -> None:
        self.close()
        reason = event.get("reason")
        how = "done" if reason == "ok" else f"ended ({reason})"
        text = f"{how} after step {event.get('step')}/{self._total_steps}"
        if event.get("seconds") is not None:
            text += f" in {seconds_text(event['seconds'])}"
        self.note(text + (f": {event['message']}" if event.get("message") else ""))

    def _warn_if_not_finite(self, event: dict[str, Any]) -> None:
        values = {name: _number(event.get(name)) for name in ("loss", "grad_norm")}
        bad = [
            f"{name.replace('_', ' ')} is {value}" for name, value in values.items() if not math.isfinite(value)
        ]
        if bad and not self._warned:
            self._warned = True
            self.note(f"step {event['step']}: {' and '.join(bad)}")

    # How often, and in what form.

    def _start_attempt(self, event: dict[str, Any]) -> None:
        self._attempt = event
        self._steps_seen = 0
        self._first_step: tuple[int, float] | None = None
        self._last_line: tuple[int, float] | None = None
        self._warned = False

    def _line_is_due(self, step: int, now_seconds: float) -> bool:
        if self._last_line is None or self._steps_seen <= FIRST_STEPS or step == self._total_steps:
            return True
        last_step, last_seconds = self._last_line
        silence_seconds = now_seconds - last_seconds
        return (
            step - last_step >= max(1, self._total_steps // 10)
            or silence_seconds >= LONGEST_SILENCE_SECONDS
            or (silence_seconds >= QUIET_SECONDS and step % _round_stride(self._total_steps) == 0)
        )

    def _move_live_line(self, event: dict[str, Any]) -> None:
        if self._lost:
            return
        description = self._prefix("step", event["step"])
        line: dict[str, Any] = {
            "total": self._total_steps,
            "completed": event["step"],
            "description": description,
            "figures": self._fitting([*self._figures(event), self._eta(event)], len(description)),
        }
        try:
            if self._live is None:
                progress = self._progress()
                self._live = (progress, progress.add_task(**line))
                progress.start()
            else:
                progress, task = self._live
                progress.update(task, **line)
        except (OSError, ValueError):
            self._lost = True

    def _progress(self) -> rich.progress.Progress:
        bar = [rich.progress.BarColumn(bar_width=20)] if self._rich.width >= WIDTH_WITH_BAR else []
        return rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            *bar,
            rich.progress.TextColumn("{task.fields[figures]}", markup=False),
            console=self._rich,
            refresh_per_second=4,  # the display shares the host with the controller
        )

    def _prefix(self, kind: str, step: int | None) -> str:
        total = str(self._total_steps)
        return f"{kind}  {step if step is not None else '?':>{len(total)}}/{total}"

    def _fitting(self, figures: list[str], taken: int) -> str:
        """As many figures as the terminal has room for, the less telling ones left out first."""
        loss, _, rate, seconds, eta = figures
        for chosen in (figures, [loss, rate, seconds, eta], [loss, seconds, eta], [loss, eta]):
            text = "  ".join(chosen)
            if taken + 1 + len(text) <= self._rich.width:
                return text
        return loss

    def _figures(self, event: dict[str, Any]) -> list[str]:
        tokens, step_seconds = event.get("tokens"), event.get("step_seconds")
        rate = count_text(tokens / step_seconds) if tokens is not None and step_seconds else "-"
        loss, grad_norm = _number(event.get("loss")), _number(event.get("grad_norm"))
        return [
            f"loss {self._column('loss', f'{loss:.3f}')}",
            f"grad norm {self._column('grad norm', significant_text(grad_norm))}",
            f"{self._column('rate', rate)} tokens/s",
            self._column("time", _text(seconds_text, step_seconds)),
        ]

    def _column(self, name: str, text: str) -> str:
        """Right-aligns a value with those already shown: a column is as wide as its widest value so far."""
        width = self._column_widths[name] = max(len(text), self._column_widths.get(name, 0))
        return text.rjust(width)

    def _eta(self, event: dict[str, Any]) -> str:
        """Time left at this attempt's pace since its first step, evaluations and checkpoints included."""
        step, now_seconds = event["step"], event["time_monotonic_seconds"]
        first_step, first_seconds = self._first_step or (step, now_seconds)
        if step <= first_step:
            return "ETA -"
        pace_seconds = max(0.0, now_seconds - first_seconds) / (step - first_step)
        return f"ETA {seconds_text(pace_seconds * max(0, self._total_steps - step))}"


def _round_stride(total_steps: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that gives at most `LINES_PER_RUN` lines."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if total_steps <= factor * power * LINES_PER_RUN:
                return factor * power
        power *= 10


def _number(value: Any) -> float:
    return math.nan if value is None else value


def _text(form: Any, value: float | None) -> str:
    return "-" if value is None else form(value)


def _with(unit: str, form: Any, value: float | None) -> str | None:
    return None if value is None else f"{form(value)} {unit}".rstrip()
