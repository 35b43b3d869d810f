"""Signals that ask a run to stop: after the step, saved, resumable."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any


class StopSignals:
    """While entered, SIGINT and SIGTERM ask the loop to stop after the step; a second SIGINT stops at once."""

    def __init__(self):
        self._asked: list[str] = []
        self._ignored = False
        self._previous: dict[int, Any] = {}

    def asked(self) -> str | None:
        """The first signal that came, or None."""
        return self._asked[0] if self._asked else None

    def ignore(self) -> None:
        """From here on the work is done and saved: a signal changes nothing."""
        self._ignored = True

    def __enter__(self) -> StopSignals:
        with suppress(ValueError):  # not the main thread: whoever called has the signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: Any) -> None:
        if self._ignored:
            return
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked.append(signal.Signals(number).name.lower())
        hint = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
        # Straight to the descriptor: a stream may be in the middle of a write, or its reader gone.
        with suppress(OSError):
            os.write(2, f"\nstopping once the step is done and saved{hint}\n".encode())
