"""What each channel of each worker does for an iteration, in order, and what every piece of it waits for.

A worker that shares the host's memory has one channel, `compute`. Any other has four more, and each of its tasks goes
through three of them; a *run*, tasks of one slot and block that follow each other on a worker, shares one upload of its
parameters and one download of its gradients:

    parameter_upload  ->  compute  ->  gradient_download        once a run
    activation_upload ->  compute  ->  activation_download      once a task

Channels go on side by side, each in its own order, and meet in events alone. There is no barrier. Every wait has one of
these reasons; `rpfunc.testing.races` proves of a run that they suffice, and tests that none can be spared.

    inputs are there        compute after the task's activation_upload
    parameters are there    compute after the run's parameter_upload
    outputs are made        activation_download after compute
    sums are made           gradient_download after the run's last compute
    handed on               whoever reads what a task has handed on, after that is on the host
    sums go on              a run that adds to sums begun elsewhere, after those are on the host
    version is complete     whoever reads a subtree of a version, after that has been written
    gradient is complete    the optimizer's step, after the last addition of each run that adds to a subtree
    room for inputs         no more than one task's inputs ahead of the one that is computed
    room for outputs        no more than one task's outputs behind
    room for a run          no more than one run's parameters ahead, or one run's sums behind

Source: own, after RoundPipe (arXiv 2604.27085): its five channels and per-layer events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rpfunc.runtime.progress import Happened
from rpfunc.runtime.tasks import Work, adds
from rpfunc.schedule.task import Schedule, Task

CHANNELS_OF_WORKER = ("compute", "activation_upload", "activation_download", "parameter_upload", "gradient_download")
"""A worker's channels; one that shares the host's memory has the first alone."""

BEHIND = 2
"""How many places a worker's buffers may lie apart: one is in use, one is on its way."""


class Wait(NamedTuple):
    """An event that has to happen first, and why."""

    reason: str
    event: Happened


class Operation(NamedTuple):
    """One piece of work of a channel; `task` is its own, or the first (upload) or last (download) of its run.

    run    all tasks of the run that it belongs to
    place  which of the worker's buffers for activations it uses, 0 or 1: its tasks take turns
    side   which of those for parameters and sums: its runs take turns
    """

    worker: int
    channel: str
    task: Task
    run: tuple[Task, ...]
    waits: tuple[Wait, ...]
    place: int
    side: int


class Trail(NamedTuple):
    """What a worker has done last, by buffer: those of an iteration make room for the next one's."""

    place: int = 0
    side: int = 0
    tasks: tuple[Happened | None, ...] = (None,) * BEHIND
    runs: tuple[Happened | None, ...] = (None,) * BEHIND
    outputs: tuple[Happened | None, ...] = (None,) * BEHIND


Line = Mapping[str, Sequence[Operation]]
"""A worker's operations by channel."""


def operations(
    iteration: int,
    schedule: Schedule,
    work: Work,
    shares_memory: Sequence[bool],
    version: int | None = None,
    trails: Sequence[Trail] = (),
) -> tuple[list[Line], list[Trail]]:
    """Returns (each worker's line, the trails that the next iteration begins with).

    shares_memory  of each worker
    version        of the parameters that is read; None: they are all there already
    trails         that the iteration before has left; none: nothing runs
    """
    worker_of = {task: worker for worker, tasks in enumerate(schedule.workers) for task in tasks}
    runs = [_runs(tasks, work) for tasks in schedule.workers]
    run_of = {task: run for own in runs for run in own for task in run}

    def event(channel: str, task: Task) -> Happened:
        return Happened(iteration, channel, task)

    def handed_on(task: Task) -> Wait:
        shared = shares_memory[worker_of[task]]
        return Wait("handed on", event("compute" if shared else "activation_download", task))

    def sums_of(task: Task) -> Wait:
        shared = shares_memory[worker_of[task]]
        last = event("compute", task) if shared else event("gradient_download", run_of[task][-1])
        return Wait("sums go on", last)

    def awaited(task: Task) -> tuple[list[Wait], list[Wait]]:
        """Returns the waits for what other tasks hand on, and those for sums that go on."""
        needed = work.workload.dependencies(task)
        read = [other for other in needed if other.microbatch == task.microbatch]
        order = [other for other in needed if other.microbatch != task.microbatch]
        return [handed_on(other) for other in read], [sums_of(other) for other in order if other not in run_of[task]]

    def line(worker: int, trail: Trail) -> tuple[Line, Trail]:
        shared = shares_memory[worker]
        found: dict[str, list[Operation]] = {channel: [] for channel in CHANNELS_OF_WORKER[: 1 if shared else None]}
        place, side, tasks_done, runs_done, outputs_done = trail[0], trail[1], *map(list, trail[2:])

        def add(channel: str, task: Task, run: tuple[Task, ...], waits: Sequence[Wait]) -> Happened:
            found[channel].append(Operation(worker, channel, task, run, tuple(waits), place, side))
            return event(channel, task)

        for run in runs[worker]:
            names = dict.fromkeys(name for task in run for name in work.subtrees(task))
            starting = [] if version is None else [Wait("version is complete", version_of(version, n)) for n in names]
            starting += [wait for task in run for wait in awaited(task)[1]]
            if not shared:
                uploaded = add("parameter_upload", run[0], run, starting + _room("a run", runs_done[side]))
                starting = [Wait("parameters are there", uploaded)]
            for task in run:
                waits = awaited(task)[0]
                if not shared:
                    up = add("activation_upload", task, run, waits + _room("inputs", tasks_done[place]))
                    waits = [Wait("inputs are there", up), *_room("outputs", outputs_done[place])]
                tasks_done[place] = add("compute", task, run, waits + (starting if task == run[0] else []))
                if not shared:
                    made = [Wait("outputs are made", event("compute", task))]
                    outputs_done[place] = add("activation_download", task, run, made)
                place = (place + 1) % BEHIND
            runs_done[side] = event("compute", run[-1])
            if any(map(adds, run)) and not shared:
                made = [Wait("sums are made", event("compute", run[-1]))]
                runs_done[side] = add("gradient_download", run[-1], run, made)
            side = (side + 1) % BEHIND
        return found, Trail(place, side, *map(tuple, (tasks_done, runs_done, outputs_done)))

    begun = trails or [Trail()] * len(schedule.workers)
    lines, after = zip(*(line(worker, trail) for worker, trail in enumerate(begun)), strict=True)
    return list(lines), list(after)


def version_of(version: int, name: str) -> Happened:
    """Returns the event that a subtree's version has been written."""
    return Happened(version, "version", name)


def gradient_waits(iteration: int, lines: Sequence[Line], work: Work) -> dict[str, list[Wait]]:
    """Returns, by name, what has to happen before a subtree's gradient may be read: the ends of all runs that add."""
    found: dict[str, list[Wait]] = {}
    for line in lines:
        channel = "gradient_download" if "gradient_download" in line else "compute"
        for operation in line[channel]:
            task, run = operation.task, operation.run
            if task == run[-1] and any(map(adds, run)):
                last = Wait("gradient is complete", Happened(iteration, channel, task))
                for name in dict.fromkeys(name for task in run for name in work.subtrees(task)):
                    found.setdefault(name, []).append(last)
    return found


def _room(what: str, last: Happened | None) -> list[Wait]:
    """Returns the wait for the last use of a buffer, if there has been any."""
    return [] if last is None else [Wait(f"room for {what}", last)]


def _runs(tasks: Sequence[Task], work: Work) -> list[tuple[Task, ...]]:
    """Returns the longest stretches of one slot and block whose sums go on inside; I and W belong to the slot B.

    Where sums come from elsewhere, a new run begins: a run that waited for them at its start might be what they need.
    """
    starts = work.workload.block_starts

    def slot(task: Task) -> tuple[int, str, int]:
        stage, kind, m = task
        block = 0 if kind == "F" else sum(start <= m for start in starts)
        return stage, "B" if kind in "IW" else kind, block

    runs: list[list[Task]] = []
    for task in tasks:
        order = [other for other in work.workload.dependencies(task) if other.microbatch != task.microbatch]
        if not runs or slot(task) != slot(runs[-1][-1]) or not set(order) <= set(runs[-1]):
            runs.append([])
        runs[-1].append(task)
    return list(map(tuple, runs))
