"""What a simulated schedule comes to: time, why workers are idle, memory, traffic."""

from __future__ import annotations

from dataclasses import dataclass

from rpfunc.plan.costs import StageCosts
from rpfunc.plan.hardware import Hardware
from rpfunc.schedule.peaks import peak_bytes
from rpfunc.schedule.resident import moved_costs
from rpfunc.schedule.runs import runs
from rpfunc.schedule.simulate import compute_only
from rpfunc.schedule.task import Schedule
from rpfunc.schedule.timeline import Event, Timeline
from rpfunc.schedule.validate import halved_as
from rpfunc.schedule.workload import Workload


@dataclass(frozen=True)
class Report:
    """Figures of a simulated schedule.

    makespan          from the first start to the last end, updates included, in the unit of the costs
    bubble            share of the workers' time without computation, as `Timeline.bubble`; the sum of the next three
    fill_drain        part of it before a worker's first and after its last task, if transfers took no time
    waits             part of it between tasks (slots that are not alike, dependencies, updates), likewise
    stalls            part of it that would not be there if transfers took no time
    peak_bytes        of each worker, see `rpfunc.schedule.peaks`
    over_memory       the workers whose peak passes the hardware's `memory_bytes`
    uploaded_bytes    by all workers, from the host
    downloaded_bytes  by all workers, to the host
    """

    makespan: float
    bubble: float
    fill_drain: float
    waits: float
    stalls: float
    peak_bytes: tuple[float, ...]
    over_memory: tuple[int, ...]
    uploaded_bytes: float
    downloaded_bytes: float


def report(timeline: Timeline, schedule: Schedule, costs: StageCosts, hardware: Hardware, work: Workload) -> Report:
    r"""Returns the figures of `simulate(schedule, costs, hardware, work)`, resident or not, whose result `timeline` is.

    Stalls are what the workers' time grows by through transfers, all workers together. The other two parts of the
    bubble are those of the schedule without them. What stays on the workers of a resident run counts as memory, and
    is not moved.
    Cost: O(n log n) for n events.

    >>> from rpfunc.plan.costs import StageCost
    >>> from rpfunc.schedule.simulate import simulate
    >>> schedule, hardware = Schedule.parse("0F0 0B0\n1X0"), Hardware(upload=1)
    >>> costs = {("F", 0): StageCost(1, 3), ("X", 1): StageCost(1), ("B", 0): StageCost(1, 3)}
    >>> work = Workload([("F", 0), ("X", 1), ("B", 0)], num_microbatches=1)
    >>> found = report(simulate(schedule, costs, hardware, work), schedule, costs, hardware, work)
    >>> found.makespan, found.peak_bytes, found.uploaded_bytes
    (7.0, (6, 0), 6.0)
    """
    work = halved_as(schedule, work)
    free = compute_only(schedule, costs, hardware.update, work)
    idle_at_ends, idle_between = _idle(free)
    time = _available(timeline)
    stalls = time - _available(free)
    moved = moved_costs(schedule, costs, work) if timeline.resident else costs
    activations, weights = [moved[task.kind, task.stage] for task in schedule.tasks], runs(schedule, moved, work)
    peaks = peak_bytes(timeline, schedule, costs, work)
    return Report(
        makespan=timeline.makespan_s,
        bubble=timeline.bubble,
        fill_drain=idle_at_ends / time if time else 0.0,
        waits=idle_between / time if time else 0.0,
        stalls=stalls / time if time else 0.0,
        peak_bytes=peaks,
        over_memory=tuple(worker for worker, peak in enumerate(peaks) if peak > hardware.memory_bytes),
        uploaded_bytes=sum(cost.input_bytes for cost in activations) + sum(run.parameter_bytes for run in weights),
        downloaded_bytes=sum(cost.output_bytes for cost in activations) + sum(run.gradient_bytes for run in weights),
    )


def _idle(free: Timeline) -> tuple[float, float]:
    """Returns the time before each worker's first and after its last task, and between tasks, of all workers."""
    own: list[list[Event]] = [[] for _ in range(free.num_workers)]
    for event in free.events:
        if event.channel == "compute":
            own[event.worker].append(event)
    active = sum(events[-1].end_s - events[0].start_s for events in own if events)
    busy = sum(event.end_s - event.start_s for events in own for event in events)
    return _available(free) - active, active - busy


def _available(timeline: Timeline) -> float:
    first, last = timeline.window_s
    return timeline.num_workers * (last - first)
