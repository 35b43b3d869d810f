"""Pipeline schedules: who runs what in which order. Pure Python, no JAX.

A `Schedule` is a small value: for each device an ordered list of `Task(kind, stage, microbatch)`. It can be built
for any number of stages and microbatches, proven (`validate`), timed (`simulate`) and given to the executor.

Sources: GPipe arXiv 1811.06965; 1F1B (PipeDream-Flush) arXiv 2006.09503, arXiv 2104.04473.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W"]


class ScheduleError(ValueError):
    """A schedule that cannot run or breaks its promise; the message names the task."""


class Task(NamedTuple):
    """One piece of work: `F` forward, `B` backward (input gradients if split), `W` weight gradients of a split
    backward, of one stage for one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, microbatch {self.microbatch})"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An order of tasks.

    Attributes:
        name: of the kind of schedule.
        stages: number of stages.
        microbatches: number of microbatches.
        order: the tasks of each device, in the order in which it runs them.
        promise: for each stage, the most microbatches whose forward activations may be alive at once.
    """

    name: str
    stages: int
    microbatches: int
    order: tuple[tuple[Task, ...], ...]
    promise: tuple[int, ...]

    def device_of(self) -> dict[int, int]:
        """The device of each stage."""
        return {task.stage: device for device, tasks in enumerate(self.order) for task in tasks}


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When every task of a schedule runs, in the unit of the costs.

    Attributes:
        start, end: by task.
        makespan: end of the last task.
        busy: work of the busiest device.
        bubble_ratio: (makespan - busy) / busy.
        peak_activations: for each stage, the most microbatches whose forward activations are alive at once.
        dispatch: all tasks, by start: an order in which every task comes after what it needs.
    """

    start: Mapping[Task, float]
    end: Mapping[Task, float]
    makespan: float
    busy: float
    bubble_ratio: float
    peak_activations: tuple[int, ...]
    dispatch: tuple[Task, ...]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: every activation is alive at the turn.

    Source: arXiv 1811.06965, figure 2.
    """
    order = tuple(
        tuple(Task("F", s, m) for m in range(microbatches)) + tuple(Task("B", s, m) for m in range(microbatches))
        for s in range(stages)
    )
    return Schedule("gpipe", stages, microbatches, order, (microbatches,) * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """As few forwards ahead as keep the next stage fed, then one forward for one backward in turn.

    Source: PipeDream-Flush, arXiv 2006.09503, section 3.3; arXiv 2104.04473, figure 3.
    """
    order = []
    for s in range(stages):
        ahead = min(microbatches, stages - 1 - s)
        tasks = [Task("F", s, m) for m in range(ahead)]
        for m in range(microbatches):
            if ahead + m < microbatches:
                tasks.append(Task("F", s, ahead + m))
            tasks.append(Task("B", s, m))
        order.append(tuple(tasks))
    promise = tuple(min(microbatches, stages - s) for s in range(stages))
    return Schedule("1f1b", stages, microbatches, tuple(order), promise)


def forward_only(stages: int, microbatches: int) -> Schedule:
    """Every stage runs the forwards in turn and keeps nothing: evaluation."""
    order = tuple(tuple(Task("F", s, m) for m in range(microbatches)) for s in range(stages))
    return Schedule("forward", stages, microbatches, order, (microbatches,) * stages)


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def build(name: str, stages: int, microbatches: int) -> Schedule:
    """A schedule by its name, proven for this shape.

    Raises:
        ScheduleError: the name is unknown, or a count is below 1.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is unknown; known: {', '.join(SCHEDULES)}")
    if stages < 1 or microbatches < 1:
        raise ScheduleError(f"{name}: {stages} stages and {microbatches} microbatches; both must be at least 1")
    schedule = SCHEDULES[name](stages, microbatches)
    validate(schedule)
    return schedule


def needs(task: Task, stages: int) -> tuple[Task, ...]:
    """What must have ended before a task starts."""
    kind, stage, microbatch = task
    if kind == "F":
        return (Task("F", stage - 1, microbatch),) if stage else ()
    if kind == "B":
        after = (Task("B", stage + 1, microbatch),) if stage + 1 < stages else ()
        return (Task("F", stage, microbatch), *after)
    return (Task("B", stage, microbatch),)


def validate(schedule: Schedule) -> Timeline:
    """Prove a schedule: complete, free of deadlock, within its memory promise.

    Returns:
        Its timeline with unit costs.

    Raises:
        ScheduleError: naming the task that breaks it.
    """
    name, stages, microbatches = schedule.name, schedule.stages, schedule.microbatches
    if stages < 1 or microbatches < 1:
        raise ScheduleError(f"{name}: {stages} stages and {microbatches} microbatches; both must be at least 1")
    if len(schedule.promise) != stages:
        raise ScheduleError(f"{name}: {len(schedule.promise)} promises for {stages} stages")
    seen: dict[Task, int] = {}
    for device, tasks in enumerate(schedule.order):
        for task in tasks:
            if task.kind not in ("F", "B", "W"):
                raise ScheduleError(f"{name}: {task} is of no known kind; use F, B or W")
            if not (0 <= task.stage < stages and 0 <= task.microbatch < microbatches):
                raise ScheduleError(f"{name}: {task} lies outside {stages} stages x {microbatches} microbatches")
            if task in seen:
                raise ScheduleError(f"{name}: {task} is scheduled twice")
            seen[task] = device
    backward = any(task.kind == "B" for task in seen)
    for stage in range(stages):
        of_stage = {task for task in seen if task.stage == stage}
        if len(devices := {seen[task] for task in of_stage}) > 1:
            raise ScheduleError(f"{name}: stage {stage} is spread over devices {sorted(devices)}")
        split = any(task.kind == "W" for task in of_stage)
        kinds: tuple[Kind, ...] = ("F", "B", "W") if split else (("F", "B") if backward else ("F",))
        for kind in kinds:
            for microbatch in range(microbatches):
                if Task(kind, stage, microbatch) not in of_stage:
                    raise ScheduleError(f"{name}: {Task(kind, stage, microbatch)} is missing")
    timeline = simulate(schedule)
    for stage, (peak, promise) in enumerate(zip(timeline.peak_activations, schedule.promise, strict=True)):
        if peak > promise:
            raise ScheduleError(f"{name}: stage {stage} keeps {peak} activations alive; it promises {promise}")
    return timeline


def simulate(
    schedule: Schedule, costs: Mapping[str, float | Sequence[float]] | None = None, latency: float = 0.0
) -> Timeline:
    """When every task starts and ends.

    Args:
        schedule: any order of tasks.
        costs: time of a task by kind, one number or one a stage; by default 1 for F, 2 for a whole backward,
            1 for each half of a split one.
        latency: time from the end of a task to the start of one that needs it on another device.

    Raises:
        ScheduleError: the order deadlocks; the message names the first task that never starts.
    """
    kinds = {task.kind for tasks in schedule.order for task in tasks}
    table = {"F": 1.0, "B": 1.0 if "W" in kinds else 2.0, "W": 1.0} | dict(costs or {})

    def cost(task: Task) -> float:
        of_kind = table[task.kind]
        return float(of_kind if isinstance(of_kind, int | float) else of_kind[task.stage])

    device_of = schedule.device_of()
    start: dict[Task, float] = {}
    end: dict[Task, float] = {}
    dispatch: list[Task] = []
    free = [0.0] * len(schedule.order)
    position = [0] * len(schedule.order)
    ready: list[tuple[float, int]] = []  # (start, device) of the tasks that come next on their devices
    waiting: dict[Task, list[int]] = {}  # devices by the task that their next one waits for

    def look_at_next(device: int) -> None:
        """Queue a device's next task, or note what it waits for."""
        if position[device] == len(schedule.order[device]):
            return
        begin = free[device]
        for need in needs(schedule.order[device][position[device]], schedule.stages):
            if need not in end:
                waiting.setdefault(need, []).append(device)
                return
            begin = max(begin, end[need] + (latency if device_of[need.stage] != device else 0.0))
        heapq.heappush(ready, (begin, device))

    for device in range(len(schedule.order)):
        look_at_next(device)
    while ready:
        begin, device = heapq.heappop(ready)
        task = schedule.order[device][position[device]]
        start[task], end[task] = begin, begin + cost(task)
        free[device] = end[task]
        position[device] += 1
        dispatch.append(task)
        look_at_next(device)
        for other in waiting.pop(task, ()):
            look_at_next(other)
    if len(dispatch) < sum(map(len, schedule.order)):
        raise ScheduleError(f"{schedule.name}: {_stuck(schedule, position, end)}")
    busy = max((sum(map(cost, tasks)) for tasks in schedule.order), default=0.0)
    makespan = max(end.values(), default=0.0)
    return Timeline(
        start=start,
        end=end,
        makespan=makespan,
        busy=busy,
        bubble_ratio=(makespan - busy) / busy if busy else 0.0,
        peak_activations=_peak_activations(schedule),
        dispatch=tuple(dispatch),
    )


def _stuck(schedule: Schedule, position: list[int], end: Mapping[Task, float]) -> str:
    for device, tasks in enumerate(schedule.order):
        if position[device] < len(tasks):
            task = tasks[position[device]]
            missing = [str(need) for need in needs(task, schedule.stages) if need not in end]
            return f"deadlock: {task} on device {device} waits for {', '.join(missing)}"
    raise AssertionError("nothing is stuck")


def _peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Most live forward activations a stage: alive from F until the later of B and W."""
    peaks = [0] * schedule.stages
    for tasks in schedule.order:
        live = [0] * schedule.stages
        last = {(task.stage, task.microbatch): i for i, task in enumerate(tasks) if task.kind != "F"}
        for i, task in enumerate(tasks):
            if task.kind == "F":
                live[task.stage] += 1
                peaks[task.stage] = max(peaks[task.stage], live[task.stage])
            elif last[task.stage, task.microbatch] == i:
                live[task.stage] -= 1
    return tuple(peaks)
