"""Runs: tasks of one stage that follow each other on a worker, and so share one upload of its parameters."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from rpfunc.plan.costs import StageCosts
from rpfunc.schedule.task import Schedule
from rpfunc.schedule.workload import Workload


class Run(NamedTuple):
    """Tasks start to stop (half open) in `schedule.tasks`, and the bytes that they move together."""

    worker: int
    iteration: int
    start: int
    stop: int
    parameter_bytes: float
    gradient_bytes: float


def runs(schedule: Schedule, costs: StageCosts, work: Workload) -> list[Run]:
    """Returns the longest stretches of one slot in one iteration, worker by worker; I and W belong to the slot B.

    >>> from rpfunc.plan.costs import StageCost
    >>> costs = {("F", 0): StageCost(1, 5), ("I", 0): StageCost(1, 5), ("W", 0): StageCost(1, 5, 7)}
    >>> schedule = Schedule.parse("0F0 0F1 0I0 0W0 0I1 0W1")
    >>> [list(run) for run in runs(schedule, costs, Workload.of(schedule))]
    [[0, 0, 0, 2, 5, 0.0], [0, 0, 2, 6, 5, 7]]
    """
    found: list[Run] = []
    all_tasks = schedule.tasks
    start = 0
    for worker, tasks in enumerate(schedule.workers):
        slots = [(stage, "B" if kind in "IW" else kind, m // work.num_microbatches) for stage, kind, m in tasks]
        for (stage, _, iteration), same in groupby(slots):
            stop = start + len(list(same))
            parts = [costs[kind, stage] for kind in {task.kind for task in all_tasks[start:stop]}]
            parameter_bytes = max(part.parameter_bytes for part in parts)
            gradient_bytes = max(part.gradient_bytes for part in parts)
            found.append(Run(worker, iteration, start, stop, parameter_bytes, gradient_bytes))
            start = stop
    return found
