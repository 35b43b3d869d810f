"""The record of a run: `events.jsonl`, one JSON object a line, each a typed event. Console, summaries and
reports are all readers of this file; nothing they say comes from elsewhere. What was not measured is null.

A line is one `write` to a file opened for appending, so a crash can tear the last line but no other, and the
reader skips what it cannot parse. JSON has no NaN: non-finite floats are the strings "nan", "inf" and "-inf"
in the file and floats again in `read_events`. Versions of the schema only add events and fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import operator
import os
import secrets
import sys
import threading
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

EVENTS_FILE = "events.jsonl"  # its name in a run directory
SCHEMA_VERSION = 1

Listener = Callable[[dict[str, Any]], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What every event has: its name in the file, and whether it must survive a power cut."""

    event: ClassVar[str]
    durable: ClassVar[bool] = False  # fdatasync costs milliseconds, a write microseconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptStart(Event):
    """A process begins or resumes the run. Earlier records of steps after `resume_step` are now lost work."""

    event: ClassVar[str] = "attempt_start"
    durable: ClassVar[bool] = True
    resume_step: int  # steps already done; 0 is a fresh start
    total_steps: int
    layout: str
    stages: int
    schedule: str | None = None  # null without a pipeline
    microbatches: int
    devices: int
    platform: str
    device_kind: str
    jax_version: str | None
    jaxlib_version: str | None
    python_version: str
    jax_titan_version: str | None
    parameters: int
    data_digest: str
    config_digest: str
    unigram_loss: float | None = None  # nats a token of the best model that ignores context
    command: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile(Event):
    """The train step was compiled: total time, and its parts where the layout measured them."""

    event: ClassVar[str] = "compile"
    seconds: float | None = None
    lower_seconds: float | None = None
    partition_seconds: float | None = None
    xla_seconds: float | None = None
    fragments: int
    transfers_per_step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(Event):
    """One optimizer step has finished."""

    event: ClassVar[str] = "step"
    step: int  # from 1
    loss: float  # mean nats a token
    grad_norm: float
    learning_rate: float
    tokens: int  # targets trained on in this step: padding and masked targets are not counted
    step_seconds: float | None
    data_wait_seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval(Event):
    """The held-out text was scored with the parameters after `step`."""

    event: ClassVar[str] = "eval"
    step: int
    loss: float  # mean nats a token
    tokens: int
    bytes: int | None = None  # of the text that the tokens cover
    bits_per_byte: float | None = None
    seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """The state after `step` is on disk."""

    event: ClassVar[str] = "checkpoint"
    durable: ClassVar[bool] = True
    step: int
    seconds: float | None
    blocking_seconds: float | None = None  # of it, while training stood still
    bytes: int | None = None
    path: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptEnd(Event):
    """The process ends on its own terms. A killed one leaves no such event."""

    event: ClassVar[str] = "attempt_end"
    durable: ClassVar[bool] = True
    reason: str  # ok, stop_after, sigint, sigterm or crash
    exit_code: int
    step: int  # the last step done
    host_peak_bytes: int | None = None
    device_peak_bytes: Sequence[int | None] | None = None  # one a device
    seconds: float | None = None  # since attempt_start
    message: str | None = None


EVENTS: tuple[type[Event], ...] = (AttemptStart, Compile, Step, Eval, Checkpoint, AttemptEnd)

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _float_fields(event: type[Event]) -> frozenset[str]:
    hints = typing.get_type_hints(event)
    names = [field.name for field in dataclasses.fields(event)]
    return frozenset(name for name in names if float in (hints[name], *typing.get_args(hints[name])))


# Only these fields turn "nan" back into a float: a message or a command may well say "nan".
_FLOAT_FIELDS = {event.event: _float_fields(event) for event in EVENTS}


def to_json(record: dict[str, Any]) -> str:
    """One line of strict JSON, with non-finite floats as strings; floats keep every bit (shortest repr)."""

    def finite(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, list):
            return [finite(item) for item in value]
        return value

    return json.dumps({key: finite(value) for key, value in record.items()}, allow_nan=False)


class EventLog(list[dict[str, Any]]):
    """The readable events of a file, oldest first; `unreadable_lines` counts what was skipped."""

    unreadable_lines: int = 0


def read_events(path: str | os.PathLike[str]) -> EventLog:
    """Reads the events of a run, whatever state a crash left the file in.

    Lines that are no JSON object with an `event` are skipped and counted. Unknown events, fields and
    versions are kept as they are, so that an old reader can read a newer file.

    Args:
        path: the `events.jsonl` of a run.

    Returns:
        One dictionary an event; non-finite floats of known events are floats.
    """
    events = EventLog()
    for line in Path(path).read_bytes().split(b"\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("event"), str):
            events.unreadable_lines += 1
            continue
        for name in _FLOAT_FIELDS.get(record["event"], ()):
            value = record.get(name)
            if isinstance(value, str):
                record[name] = _NON_FINITE.get(value, value)
        events.append(record)
    return events


def boot_id() -> str | None:
    """Names this boot of the machine, within which monotonic times compare; None where nothing names it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


class Recorder:
    """Appends events to a run's file and hands each, as the dictionary a reader would get, to the listeners.

    Opening an existing file continues its run: the same `run_id`, the next `attempt`. Neither a full disk nor
    a broken listener stops the training: the first failed write prints one line to stderr and
    `write_failures` counts them all (`seq` shows the gap); a listener that raises is reported and dropped.

    Args:
        path: the `events.jsonl` to append to; made, with its folder, where missing.
        run_id: the name of a new run; drawn at random by default.
        listeners: called in order with each event, after it was written.

    Raises:
        ValueError: the file belongs to another `run_id`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, run_id: str | None = None, listeners: Sequence[Listener] = ()
    ):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            past = read_events(self.path)
            run_ids = [event["run_id"] for event in past if isinstance(event.get("run_id"), str)]
            if run_id is not None and run_ids and run_ids[-1] != run_id:
                raise ValueError(f"{self.path}: holds run {run_ids[-1]}, not {run_id}; use another directory")
            size = os.fstat(self._file).st_size
            self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        except BaseException:
            self.close()
            raise
        self.run_id: str = run_ids[-1] if run_ids else run_id or secrets.token_hex(8)
        attempts = [event["attempt"] for event in past if isinstance(event.get("attempt"), int)]
        self.attempt: int = max(attempts, default=0) + 1
        self.write_failures = 0
        self._listeners = list(listeners)
        self._seq = 0
        self._boot_id = boot_id()
        # Re-entrant: a signal handler may record while the main thread is recording.
        self._lock = threading.RLock()

    def emit(self, event: Event) -> dict[str, Any]:
        """Writes one event, and returns it as the listeners saw it."""
        with self._lock:
            if self._file is None:
                raise ValueError(f"{self.path}: the record is closed; cannot add {event.event}")
            record = self._envelope(event)
            for field in dataclasses.fields(event):
                record[field.name] = _plain(getattr(event, field.name), f"{event.event}.{field.name}")
            line = to_json(record).encode() + b"\n"
            self._seq += 1
            try:
                self._append(self._file, line)
                if event.durable:
                    _sync(self._file)
            except OSError as error:
                self._count_failure(error)
            for listener in tuple(self._listeners):
                self._tell(listener, record)
            return record

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file is not None:
            # Some network file systems report a full disk only here.
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _envelope(self, event: Event) -> dict[str, Any]:
        return {
            "event": event.event,
            "version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "seq": self._seq,
            "time_unix_seconds": time.time(),
            "time_monotonic_seconds": time.monotonic(),
            "boot_id": self._boot_id,
            "pid": os.getpid(),
        }

    def _append(self, file: int, line: bytes) -> None:
        if self._torn:  # end what a crash or a full disk left unfinished, in the same write
            line = b"\n" + line
        written = 0
        try:
            while written < len(line):
                count = os.write(file, line[written:])
                if count == 0:
                    raise OSError(errno.EIO, "nothing was written")
                written += count
        finally:
            self._torn = written < len(line) and (self._torn or written > 0)

    def _count_failure(self, error: OSError) -> None:
        self.write_failures += 1
        if self.write_failures == 1:
            _warn(f"{self.path}: {error.strerror or error}; training continues, later failures are only counted")

    def _tell(self, listener: Listener, record: dict[str, Any]) -> None:
        try:
            listener(record)
        except Exception as error:
            self._listeners.remove(listener)
            _warn(f"a listener of the run's events failed and is dropped: {type(error).__name__}: {error}")


def _plain(value: Any, name: str) -> Any:
    """The JSON value of a Python, NumPy or JAX scalar, or of a list of them; floats stay floats, exactly."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    try:
        return operator.index(value)
    except TypeError:
        pass
    try:
        return float(value)
    except TypeError:
        raise TypeError(
            f"{name}: {type(value).__name__} has no JSON form; pass numbers, strings or lists"
        ) from None


def _sync(file: int) -> None:
    getattr(os, "fdatasync", os.fsync)(file)  # macOS has no fdatasync


def _warn(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed, or on the same full disk
        print(f"jax-titan: {text}", file=sys.stderr, flush=True)
