"""Schedules keep their promises for every shape, and a broken one is named by the task that breaks it."""

import dataclasses
import random

import pytest

from jax_titan.mpmd import schedule as schedules
from jax_titan.mpmd.schedule import Schedule, ScheduleError, Task

SHAPES = [(stages, microbatches) for stages in range(1, 9) for microbatches in (1, 2, 3, 4, 7, 8, 16, 33)]


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_every_shape_is_complete_and_free_of_deadlock(name):
    for stages, microbatches in SHAPES:
        schedule = schedules.build(name, stages, microbatches)
        expected = {Task(k, s, m) for k in ("F", "B") for s in range(stages) for m in range(microbatches)}
        assert {task for tasks in schedule.order for task in tasks} == expected


def test_1f1b_keeps_as_many_activations_as_published():
    for stages, microbatches in SHAPES:
        peaks = schedules.validate(schedules.one_f_one_b(stages, microbatches)).peak_activations
        assert peaks == tuple(min(microbatches, stages - s) for s in range(stages))


def test_gpipe_keeps_all_activations():
    for stages, microbatches in SHAPES:
        peaks = schedules.validate(schedules.gpipe(stages, microbatches)).peak_activations
        assert peaks == (microbatches,) * stages


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_the_bubble_is_the_closed_form(name):
    # (S - 1) / M of the ideal time with equal stages: arXiv 2104.04473, section 2.2.1.
    for stages, microbatches in SHAPES:
        if microbatches < stages:
            continue
        timeline = schedules.simulate(schedules.build(name, stages, microbatches))
        assert timeline.bubble_ratio == pytest.approx((stages - 1) / microbatches)


def test_unequal_stages_and_latency_are_timed():
    schedule = schedules.one_f_one_b(2, 1)
    timeline = schedules.simulate(schedule, {"F": [1.0, 4.0], "B": [2.0, 8.0]}, latency=0.5)
    assert timeline.end[Task("F", 0, 0)] == 1.0
    assert timeline.start[Task("F", 1, 0)] == 1.5
    assert timeline.end[Task("B", 1, 0)] == 13.5
    assert timeline.makespan == 16.0
    assert timeline.busy == 12.0


def test_the_dispatch_order_never_runs_ahead_of_what_a_task_needs():
    for name in schedules.SCHEDULES:
        for stages, microbatches in SHAPES:
            timeline = schedules.simulate(schedules.build(name, stages, microbatches))
            done = set()
            for task in timeline.dispatch:
                assert set(schedules.needs(task, stages)) <= done
                done.add(task)


def _with_order(schedule: Schedule, device: int, order) -> Schedule:
    changed = list(schedule.order)
    changed[device] = tuple(order)
    return dataclasses.replace(schedule, order=tuple(changed))


def test_a_missing_task_is_named():
    good = schedules.one_f_one_b(3, 4)
    broken = _with_order(good, 1, [t for t in good.order[1] if t != Task("B", 1, 2)])
    with pytest.raises(ScheduleError, match=r"B\(stage 1, microbatch 2\) is missing"):
        schedules.validate(broken)


def test_a_doubled_task_is_named():
    good = schedules.gpipe(2, 2)
    broken = _with_order(good, 0, [*good.order[0], Task("F", 0, 1)])
    with pytest.raises(ScheduleError, match=r"F\(stage 0, microbatch 1\) is scheduled twice"):
        schedules.validate(broken)


def test_a_foreign_task_is_named():
    good = schedules.gpipe(2, 2)
    broken = _with_order(good, 0, [*good.order[0], Task("F", 0, 5)])
    with pytest.raises(ScheduleError, match=r"F\(stage 0, microbatch 5\) lies outside"):
        schedules.validate(broken)


def test_a_backward_before_its_forward_is_a_deadlock_and_named():
    good = schedules.gpipe(2, 2)
    order = list(good.order[0])
    order.insert(0, order.pop(2))
    with pytest.raises(
        ScheduleError, match=r"deadlock: B\(stage 0, microbatch 0\) on device 0 waits for F\(stage 0"
    ):
        schedules.validate(_with_order(good, 0, order))


def test_a_stage_on_two_devices_is_refused():
    good = schedules.gpipe(2, 1)
    moved = [Task("F", 0, 0)], [*good.order[1], Task("B", 0, 0)]
    with pytest.raises(ScheduleError, match="stage 0 is spread over devices"):
        schedules.validate(dataclasses.replace(good, order=tuple(map(tuple, moved))))


def test_a_broken_memory_promise_is_named():
    good = schedules.gpipe(3, 4)
    with pytest.raises(ScheduleError, match="stage 0 keeps 4 activations alive; it promises 3"):
        schedules.validate(dataclasses.replace(good, promise=(3, 2, 1)))


@pytest.mark.parametrize(("name", "stages", "microbatches"), [("1f2b", 2, 2), ("1f1b", 0, 2), ("gpipe", 2, 0)])
def test_an_unknown_name_or_an_empty_shape_is_refused(name, stages, microbatches):
    with pytest.raises(ScheduleError):
        schedules.build(name, stages, microbatches)


def _split(stages, microbatches):
    """1F1B with every backward but the first stage's cut in two."""
    whole = schedules.one_f_one_b(stages, microbatches)
    order = [
        [
            half
            for t in tasks
            for half in ([t, Task("W", t.stage, t.microbatch)] if t.kind == "B" and t.stage else [t])
        ]
        for tasks in whole.order
    ]
    return dataclasses.replace(whole, order=tuple(map(tuple, order)))


def test_a_split_backward_is_complete_only_with_all_its_weight_gradients():
    good = _split(3, 4)
    schedules.validate(good)
    for device in (1, 2):
        for microbatch in range(4):
            lost = Task("W", device, microbatch)
            with pytest.raises(ScheduleError, match=rf"W\(stage {device}, microbatch {microbatch}\) is missing"):
                schedules.validate(_with_order(good, device, [t for t in good.order[device] if t != lost]))


def test_forwards_alone_are_a_schedule():
    for stages, microbatches in SHAPES:
        schedules.validate(schedules.forward_only(stages, microbatches))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"promise": (2,)}, "1 promises for 2 stages"),
        ({"microbatches": 0}, "both must be at least 1"),
        ({"order": ((Task("X", 0, 0),), ())}, r"X\(stage 0, microbatch 0\) is of no known kind"),  # pyright: ignore
    ],
)
def test_a_schedule_that_is_none_is_refused(change, message):
    with pytest.raises(ScheduleError, match=message):
        schedules.validate(dataclasses.replace(schedules.gpipe(2, 2), **change))


def test_a_timeline_is_the_longest_path_through_the_needs():
    """An independent reference: relax every start until nothing moves."""
    generator = random.Random(0)
    for _ in range(40):
        stages, microbatches = generator.randint(1, 5), generator.randint(1, 6)
        schedule = generator.choice([schedules.gpipe, schedules.one_f_one_b, _split])(stages, microbatches)
        costs = {k: [generator.choice([0.5, 1.0, 2.0, 3.25]) for _ in range(stages)] for k in "FBW"}
        latency = generator.choice([0.0, 0.25, 2.0])
        timeline = schedules.simulate(schedule, costs, latency)
        start = dict.fromkeys(timeline.start, 0.0)
        moved = True
        while moved:
            moved = False
            for tasks in schedule.order:
                for before, task in zip((None, *tasks), tasks, strict=False):
                    end = {t: start[t] + costs[t.kind][t.stage] for t in start}
                    bounds = [end[before]] if before else [0.0]
                    for need in schedules.needs(task, stages):
                        bounds.append(end[need] + (latency if need.stage != task.stage else 0.0))
                    if max(bounds) > start[task]:
                        start[task], moved = max(bounds), True
        assert timeline.start == pytest.approx(start)
        assert timeline.makespan == pytest.approx(max(start[t] + costs[t.kind][t.stage] for t in start))
