"""Pipeline schedules: who runs what in which order. Pure Python, no JAX.

A `Schedule` is a small value: for each device an ordered list of `Task(kind, stage, microbatch)`. It can be built
for any number of stages and microbatches, proven (`validate`), timed (`simulate`) and given to the executor.

Sources: GPipe arXiv 1811.06965; 1F1B (PipeDream-Flush) arXiv 2006.09503, arXiv 2104.04473.
"""

from __future__ import annotations

import dataclasses
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
    seen: dict[Task, int] = {}
    for device, tasks in enumerate(schedule.order):
        for task in tasks:
            if not (0 <= task.stage < stages and 0 <= task.microbatch < microbatches):
                raise ScheduleError(f"{name}: {task} lies outside {stages} stages x {microbatches} microbatches")
            if task in seen:
                raise ScheduleError(f"{name}: {task} is scheduled twice")
            seen[task] = device
    kinds = {task.kind for task in seen}
    for stage in range(stages):
        devices = {seen[task] for task in seen if task.stage == stage}
        if len(devices) > 1:
            raise ScheduleError(f"{name}: stage {stage} is spread over devices {sorted(devices)}")
        for microbatch in range(microbatches):
            for kind in ("F", "B") if "B" in kinds else ("F",):
                if Task(kind, stage, microbatch) not in seen:
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
    total = sum(map(len, schedule.order))
    while len(dispatch) < total:
        ready: list[tuple[float, int, Task]] = []
        for device, tasks in enumerate(schedule.order):
            if position[device] == len(tasks):
                continue
            task = tasks[position[device]]
            required = needs(task, schedule.stages)
            if all(need in end for need in required):
                arrivals = [end[n] + (latency if device_of[n.stage] != device else 0.0) for n in required]
                ready.append((max([free[device], *arrivals]), device, task))
        if not ready:
            raise ScheduleError(f"{schedule.name}: {_stuck(schedule, position, end)}")
        begin, device, task = min(ready)
        start[task], end[task] = begin, begin + cost(task)
        free[device] = end[task]
        position[device] += 1
        dispatch.append(task)
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
