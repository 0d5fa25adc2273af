"""How many bytes a schedule keeps on each worker at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from rpfunc.plan.costs import StageCosts
from rpfunc.schedule.runs import runs
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.timeline import Timeline
from rpfunc.schedule.workload import Workload


class Stay(NamedTuple):
    """Bytes that are on a worker from start to end."""

    worker: int
    start: float
    end: float
    num_bytes: float


def peak_bytes(
    timeline: Timeline, schedule: Schedule, costs: StageCosts, work: Workload, resident: bool = False
) -> tuple[float, ...]:
    """Returns for each worker the most bytes that are on it at once.

    A run's parameters are there from the start of their upload to the end of the run, its gradients from the start of
    the run to the end of their download; a task's inputs from the start of their upload to its end, its outputs from
    its start to the end of their download, its working bytes while it is computed. A transfer that takes no time
    happens when it is needed.

    `resident` is for schedules that bind stages to workers. Parameters and gradients of all stages of a worker are
    there all the time, once for a stage number, which means the same layers forward and backward, as in
    `Plan.symmetric`. A task's inputs stay until its stage goes on with its microbatch, so those of F until B.
    Cost: O(n log n) for n events.
    """
    changes: list[list[tuple[float, float]]] = [[] for _ in schedule.workers]
    for worker, start, end, num_bytes in _stays(timeline, schedule, costs, work, resident):
        if num_bytes:
            changes[worker] += [(start, num_bytes), (end, -num_bytes)]
    weights = _weights(schedule, costs) if resident else [0] * len(changes)
    return tuple(weight + _peak(own) for weight, own in zip(weights, changes, strict=True))


def _stays(timeline: Timeline, schedule: Schedule, costs: StageCosts, work: Workload, resident: bool) -> Iterator[Stay]:
    starts: dict[tuple[str, Task], float] = {}
    ends: dict[tuple[str, Task], float] = {}
    for event in timeline.events:
        starts.setdefault((event.channel, event.task), event.start_s)
        ends[event.channel, event.task] = event.end_s
    tasks = schedule.tasks
    goes_on = _next_starts(schedule, starts) if resident else {}
    for worker, own in enumerate(schedule.workers):
        for task in own:
            cost, start, end = costs[task.kind, task.stage], starts["compute", task], ends["compute", task]
            yield Stay(worker, starts.get(("activation_upload", task), start), goes_on.get(task, end), cost.input_bytes)
            yield Stay(worker, start, ends.get(("activation_download", task), end), cost.output_bytes)
            yield Stay(worker, start, end, cost.working_bytes)
    for run in [] if resident else runs(schedule, costs, work):
        first, last = tasks[run.start], tasks[run.stop - 1]
        start, end = starts["compute", first], ends["compute", last]
        yield Stay(run.worker, starts.get(("parameter_upload", first), start), end, run.parameter_bytes)
        yield Stay(run.worker, start, ends.get(("gradient_download", last), end), run.gradient_bytes)


def _next_starts(schedule: Schedule, starts: dict[tuple[str, Task], float]) -> dict[Task, float]:
    """Returns for each task whose stage its worker goes on with, for the same microbatch, when it does."""
    found: dict[Task, float] = {}
    for tasks in schedule.workers:
        before: dict[tuple[int, int], Task] = {}
        for task in tasks:
            key = task.stage, task.microbatch
            if key in before:
                found[before[key]] = starts["compute", task]
            before[key] = task
    return found


def _weights(schedule: Schedule, costs: StageCosts) -> list[float]:
    """Returns the bytes of parameters and gradients that are bound to each worker."""
    weights = []
    for tasks in schedule.workers:
        kinds = defaultdict(list)
        for kind, stage in {(task.kind, task.stage) for task in tasks}:
            kinds[stage].append(costs[kind, stage])
        weights.append(
            sum(
                max(cost.parameter_bytes for cost in own) + max(cost.gradient_bytes for cost in own)
                for own in kinds.values()
            )
        )
    return weights


def _peak(changes: list[tuple[float, float]]) -> float:
    """Returns the highest sum on the way; at one moment what leaves makes room for what comes."""
    live: float = 0
    peak: float = 0
    for _, change in sorted(changes):
        live += change
        peak = max(peak, live)
    return peak
