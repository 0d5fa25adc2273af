"""Simulating a schedule: when each task would run, given what tasks cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rpfunc.errors import PlanError
from rpfunc.plan.costs import StageCosts, cost_problems
from rpfunc.plan.hardware import COMPUTE_ONLY, Hardware
from rpfunc.schedule.resident import moved_costs
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.timeline import HOST, Event, Timeline
from rpfunc.schedule.transfers import with_transfers
from rpfunc.schedule.updates import gradient_tasks, update_task
from rpfunc.schedule.validate import halved_as, validate
from rpfunc.schedule.workload import Workload

Step = Task | int
"""What starts and ends: a task, or the update of an iteration."""


def simulate(
    schedule: Schedule,
    costs: StageCosts,
    hardware: Hardware = COMPUTE_ONLY,
    work: Workload | None = None,
    *,
    resident: bool = False,
) -> Timeline:
    r"""Returns when everything happens if every task starts as soon as its worker and its dependencies allow.

    A task starts when its worker's task before, its dependencies, and the update that it awaits have ended. The update
    of an iteration runs on the host, once the update before and all gradients of the iteration are there. Without
    `work`, the schedule is taken for one iteration. Times have the unit of the costs, and their type: integers and
    fractions stay exact. Events come worker by worker, in order of time; updates last.
    Memory is not looked at: `report` says which workers pass the hardware's.

    resident  each stage stays on its worker, as classic pipelines have it, and so does all that the worker has:
              parameters, gradients, and activations that it has made or read. Else everything comes from the host when
              it is needed, and goes back. See `moved_costs`

    Cost: O(tasks). Raises ScheduleError as `validate` does, and for `resident` as `moved_costs` does; PlanError for a
    stage without costs.

    >>> from rpfunc.plan.costs import StageCost
    >>> costs = {("F", 0): StageCost(1), ("X", 1): StageCost(2), ("B", 0): StageCost(3)}
    >>> timeline = simulate(Schedule.parse("0F0 0F1 0B0 0B1\n1X0 1X1"), costs)
    >>> [f"{event.task} {event.start_s}-{event.end_s}" for event in timeline.events if event.worker == 1]
    ['1X0 1-3', '1X1 3-5']
    """
    work = Workload.of(schedule) if work is None else halved_as(schedule, work)
    _check(schedule, costs, work)
    moved = moved_costs(schedule, costs, work) if resident else costs
    if hardware.transfers_cost:
        timeline = with_transfers(schedule, moved, hardware, work)
    else:
        timeline = compute_only(schedule, moved, hardware.update, work)
    return replace(timeline, resident=resident)


def compute_only(schedule: Schedule, costs: StageCosts, update: float, work: Workload) -> Timeline:
    """Returns the timeline in which transfers take no time.

    Each worker walks along its tasks until one has to wait; it is parked at what that waits for, and goes on once that
    has ended. So no clock is needed, and nothing is looked at twice.
    """
    times = {(stage, kind): cost.time for (kind, stage), cost in costs.items()}
    gradients = gradient_tasks(schedule, work)
    events: list[list[Event]] = [[] for _ in range(len(schedule.workers) + 1)]
    ends: dict[Step, float] = {}
    parked: dict[Step, list[int]] = {}
    ready = list(range(len(events)))

    def with_update(task: Task) -> list[Step]:
        awaited = work.awaited_update(task)
        return [*work.dependencies(task), *([] if awaited is None else [awaited])]

    def walk(
        worker: int, channel: str, steps: Iterable[tuple[Step, Task, float]], needed: Callable[[Any], Sequence[Step]]
    ) -> Iterator[Step]:
        """Goes from step to step; yields what must end before it can go on."""
        clock: float = 0
        own = events[worker]
        for step, task, time in steps:
            start = clock
            for other in needed(step):
                end = ends.get(other)
                if end is None:
                    yield other
                    end = ends[other]
                if end > start:
                    start = end
            ends[step] = clock = start + time
            own.append(Event(worker, channel, task, start, clock))
            if step in parked:
                ready.extend(parked.pop(step))

    walks = [
        walk(
            worker,
            "compute",
            zip(tasks, tasks, (times[stage, kind] for stage, kind, _ in tasks), strict=True),
            with_update if len(gradients) > 1 else work.dependencies,
        )
        for worker, tasks in enumerate(schedule.workers)
    ]
    exact = update or 0  # 0.0 would make floats of fractions
    updates = [(iteration, update_task(work, iteration), exact) for iteration in range(len(gradients))]
    walks.append(walk(HOST, "update", updates, gradients.__getitem__))
    while ready:
        index = ready.pop()
        waits_for = next(walks[index], None)
        if waits_for is not None:
            parked.setdefault(waits_for, []).append(index)
    if parked:
        validate(schedule, work)  # which says who waits for what
        raise AssertionError("simulate: tasks wait for ever in a schedule that validate accepts")
    return Timeline(tuple(event for own in events for event in own), len(schedule.workers))


def _check(schedule: Schedule, costs: StageCosts, work: Workload) -> None:
    """Raises for an incomplete schedule and for missing costs; does little where all is well."""
    tasks = schedule.tasks
    counts = Counter((kind, stage) for stage, kind, _ in tasks)
    total = work.all_microbatches.stop
    if work.halved:  # counted first: a wrong number may ask for more tasks than memory holds
        complete = len(tasks) == work.num_tasks and set(tasks) == set(work.tasks)
    else:
        complete = counts == dict.fromkeys(work.slots, total) and max(m for _, _, m in tasks) < total
    if not complete or len(set(tasks)) < len(tasks):
        validate(schedule, work)  # which says what is wrong
    missing = sorted(counts.keys() - costs.keys(), key=lambda slot: (slot[1], slot[0]))
    problems = [f"{slot} is missing, tasks that need it: {counts[slot]}" for slot in missing]
    problems += cost_problems(costs, counts)
    if problems:
        raise PlanError.listing("costs", problems)
