"""How many bytes a schedule keeps on each worker at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from rpfunc.plan.costs import StageCosts
from rpfunc.schedule.resident import moved_costs, read_before
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


def peak_bytes(timeline: Timeline, schedule: Schedule, costs: StageCosts, work: Workload) -> tuple[float, ...]:
    """Returns for each worker the most bytes that are on it at once.

    A run's parameters are there from the start of their upload to the end of the run, its gradients from the start of
    the run to the end of their download; a task's inputs from the start of their upload to its end, its outputs from
    its start to the end of their download, its working bytes while it is computed. A transfer that takes no time
    happens when it is needed.

    In a resident run the parameters and gradients of all stages of a worker are there all the time, once for a stage
    number. What a stage has read of a microbatch stays until its last task on it has ended, so F's input until B's end;
    outputs that the same worker reads stay from the start of the task that makes them.
    Cost: O(n log n) for n events.
    """
    changes: list[list[tuple[float, float]]] = [[] for _ in schedule.workers]
    for worker, start, end, num_bytes in (_bound_stays if timeline.resident else _stays)(
        timeline, schedule, costs, work
    ):
        if num_bytes:
            changes[worker] += [(start, num_bytes), (end, -num_bytes)]
    weights = _weights(schedule, costs) if timeline.resident else [0] * len(changes)
    return tuple(weight + _peak(own) for weight, own in zip(weights, changes, strict=True))


def _stays(timeline: Timeline, schedule: Schedule, costs: StageCosts, work: Workload) -> Iterator[Stay]:
    starts, ends = _extents(timeline)
    tasks = schedule.tasks
    for worker, own in enumerate(schedule.workers):
        for task in own:
            cost, start, end = costs[task.kind, task.stage], starts["compute", task], ends["compute", task]
            yield Stay(worker, starts.get(("activation_upload", task), start), end, cost.input_bytes)
            yield Stay(worker, start, ends.get(("activation_download", task), end), cost.output_bytes)
            yield Stay(worker, start, end, cost.working_bytes)
    for run in runs(schedule, costs, work):
        first, last = tasks[run.start], tasks[run.stop - 1]
        start, end = starts["compute", first], ends["compute", last]
        yield Stay(run.worker, starts.get(("parameter_upload", first), start), end, run.parameter_bytes)
        yield Stay(run.worker, start, ends.get(("gradient_download", last), end), run.gradient_bytes)


def _bound_stays(timeline: Timeline, schedule: Schedule, costs: StageCosts, work: Workload) -> Iterator[Stay]:
    """Yields the activations of a resident run."""
    starts, ends = _extents(timeline)
    moved = moved_costs(schedule, costs, work)
    last_ends: dict[tuple[int, int], float] = {}
    read_at: dict[Task, float] = {}
    for own in schedule.workers:
        here = set(own)
        for task in own:
            last_ends[task.stage, task.microbatch] = ends["compute", task]  # the last one stays
            if task.kind != "W":
                read = here.intersection(work.dependencies(task))
                read_at |= {other: starts["compute", task] for other in read if other.microbatch == task.microbatch}
    for worker, own in enumerate(schedule.workers):
        for task in own:
            stage, kind, microbatch = task
            cost, start, end = costs[kind, stage], starts["compute", task], ends["compute", task]
            uploaded = moved[kind, stage].input_bytes
            new = max(0, cost.input_bytes - read_before(kind, stage, costs))
            leaves = ends.get(("activation_download", task), read_at.get(task, end))
            yield Stay(worker, starts.get(("activation_upload", task), start), last_ends[stage, microbatch], uploaded)
            yield Stay(worker, start, last_ends[stage, microbatch], new - uploaded)
            yield Stay(worker, start, leaves, cost.output_bytes)
            yield Stay(worker, start, end, cost.working_bytes)


def _extents(timeline: Timeline) -> tuple[dict[tuple[str, Task], float], dict[tuple[str, Task], float]]:
    """Returns the first start and the last end of each task on each channel."""
    starts: dict[tuple[str, Task], float] = {}
    ends: dict[tuple[str, Task], float] = {}
    for event in timeline.events:
        starts.setdefault((event.channel, event.task), event.start_s)
        ends[event.channel, event.task] = event.end_s
    return starts, ends


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
