"""How many bytes a schedule keeps on each worker at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rpfunc.plan.costs import StageCosts
from rpfunc.schedule.runs import runs
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.timeline import Event, Timeline
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
    `Plan.symmetric`. A task's inputs stay until its stage goes on with its microbatch, so those of F until B, its
    outputs until its end.
    Cost: O(n log n) for n events.
    """
    stays = _resident(timeline, costs) if resident else _streamed(timeline, schedule, costs, work)
    changes: list[list[tuple[float, float]]] = [[] for _ in schedule.workers]
    for worker, start, end, num_bytes in stays:
        if num_bytes:
            changes[worker] += [(start, num_bytes), (end, -num_bytes)]
    weights = _weights(schedule, costs) if resident else [0] * len(changes)
    return tuple(weight + _peak(own) for weight, own in zip(weights, changes, strict=True))


def _streamed(timeline: Timeline, schedule: Schedule, costs: StageCosts, work: Workload) -> Iterator[Stay]:
    starts: dict[tuple[str, Task], float] = {}
    ends: dict[tuple[str, Task], float] = {}
    for event in timeline.events:
        starts.setdefault((event.channel, event.task), event.start_s)
        ends[event.channel, event.task] = event.end_s
    for event in _computed(timeline):
        worker, _, task, start, end = event
        cost = costs[task.kind, task.stage]
        yield Stay(worker, starts.get(("activation_upload", task), start), end, cost.input_bytes)
        yield Stay(worker, start, ends.get(("activation_download", task), end), cost.output_bytes)
        yield Stay(worker, start, end, cost.working_bytes)
    tasks = schedule.tasks
    for run in runs(schedule, costs, work):
        first, last = tasks[run.start], tasks[run.stop - 1]
        start, end = starts["compute", first], ends["compute", last]
        yield Stay(run.worker, starts.get(("parameter_upload", first), start), end, run.parameter_bytes)
        yield Stay(run.worker, start, ends.get(("gradient_download", last), end), run.gradient_bytes)


def _resident(timeline: Timeline, costs: StageCosts) -> Iterator[Stay]:
    visits: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
    for event in _computed(timeline):
        cost = costs[event.task.kind, event.task.stage]
        yield Stay(event.worker, event.start_s, event.end_s, cost.output_bytes + cost.working_bytes)
        visits[event.worker, event.task.stage, event.task.microbatch].append(event)
    for own in visits.values():
        for event, goes_on in zip(own, [*(event.start_s for event in own[1:]), own[-1].end_s], strict=True):
            yield Stay(event.worker, event.start_s, goes_on, costs[event.task.kind, event.task.stage].input_bytes)


def _computed(timeline: Timeline) -> Iterable[Event]:
    return sorted((event for event in timeline.events if event.channel == "compute"), key=lambda event: event.start_s)


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
