"""Timing many plans at once under one schedule: the longest path through its tasks, for each plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from rpfunc.plan.costs import LayerCost, StageCost
from rpfunc.plan.hardware import Hardware
from rpfunc.schedule.runs import runs
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Slot, Workload

Times = np.ndarray[tuple[int, int], np.dtype[np.float64]]
"""One row for each slot, in a fixed order, and one of zeros; one column for each plan."""

Makespans = np.ndarray[tuple[int], np.dtype[np.float64]]
"""One for each plan."""

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

FIELDS = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


class Order(NamedTuple):
    """The tasks of a schedule, numbered so that each comes after all that it waits for; there is no update.

    slots       (kind, stage) of the tasks
    joined      for each stage but the last: it is on the same worker as the next
    levels      where tasks begin and end that wait for none of each other
    slot        of each task, its place in `slots`
    needed      tasks that must have ended, a row for each task, filled up with the number after the last task
    feeder      the task whose outputs it reads
    fed         the task from whose start on its inputs may be uploaded
    run_before  the first task of the run from whose start on the parameters of this task's run may be uploaded
    is_first    1 for the first task of a run, 0 for others
    is_last     1 for the last task of a run, 0 for others
    """

    slots: list[Slot]
    joined: list[bool]
    levels: list[tuple[int, int]]
    slot: Numbers
    needed: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    feeder: Numbers
    fed: Numbers
    run_before: Numbers
    is_first: Numbers
    is_last: Numbers


class SlotTimes(NamedTuple):
    """What slots take for each plan: computation, and transfers of a microbatch and of a run."""

    compute: Times
    upload: Times
    download: Times
    parameters: Times
    gradients: Times


def order_of(schedule: Schedule, work: Workload, hardware: Hardware) -> Order:
    """Returns the order of a complete schedule of one iteration, in which no microbatch is read by two slots."""
    tasks = schedule.tasks
    none = len(tasks)
    numbers = {task: number for number, task in enumerate(tasks)}
    slots = sorted({(kind, stage) for stage, kind, _ in tasks})
    needed = [[numbers[other] for other in work.dependencies(task)] for task in tasks]
    feeder = [_feeder(task, work, numbers) for task in tasks]
    fed, run_before, is_first, is_last = [none] * none, [none] * none, [0] * none, [0] * none
    start = 0
    for own in schedule.workers:
        for number in range(start, start + len(own)):
            needed[number] += [number - 1] if number > start else []
            fed[number] = number - hardware.prefetch if number - hardware.prefetch >= start else none
        start += len(own)
    found = runs(schedule, dict.fromkeys(slots, StageCost(0.0)), work)
    for place, run in enumerate(found):
        is_first[run.start] = is_last[run.stop - 1] = 1
        before = found[place - hardware.prefetch_runs] if place >= hardware.prefetch_runs else run
        if before is not run and before.worker == run.worker:
            run_before[run.start] = before.start
    levels = _levels(needed)
    sequence = [number for level in levels for number in level]
    place_of = np.empty(none + 1, dtype=np.int64)
    place_of[[*sequence, none]] = np.arange(none + 1)
    width = max(map(len, needed))
    filled = np.array([[*others, *[none] * (width - len(others))] for others in needed], dtype=np.int64)
    slot_numbers = {slot: number for number, slot in enumerate(slots)}
    slot_of = np.array([slot_numbers[tasks[number].kind, tasks[number].stage] for number in sequence])
    feeder_of, fed_of, before_of = (place_of[np.array(column)[sequence]] for column in (feeder, fed, run_before))
    homes = {task.stage: worker for worker, own in enumerate(schedule.workers) for task in own}
    return Order(
        slots,
        [homes[stage] == homes[stage + 1] for stage in range(len(homes) - 1)],
        list(pairwise(accumulate(map(len, levels), initial=0))),
        slot_of,
        place_of[filled[sequence]],
        feeder_of,
        fed_of,
        before_of,
        np.array(is_first)[sequence],
        np.array(is_last)[sequence],
    )


def makespans(order: Order, times: SlotTimes) -> Makespans:
    """Returns how long the schedule takes with each plan; every transfer has a link of its own.

    Exact where transfers take no time; else a lower bound in practice, as transfers do not wait for each other.
    """
    compute, upload, download, parameters, gradients = times
    is_moved, is_loaded = upload.any() or download.any(), parameters.any()
    slot_of_feeder = np.append(order.slot, len(order.slots))[order.feeder]
    ends = np.empty((len(order.slot) + 1, compute.shape[1]))
    ends[-1] = 0.0
    starts = ends.copy() if is_moved or is_loaded else ends
    for level in order.levels:
        own = slice(*level)
        slot = order.slot[own]
        first, *others = order.needed[own].T
        start = ends.take(first, axis=0)  # in half the time of an index
        for other in others:
            np.maximum(start, ends.take(other, axis=0), out=start)
        if is_moved:
            handed_on = ends.take(order.feeder[own], axis=0) + download.take(slot_of_feeder[own], axis=0)
            fed = np.maximum(handed_on, starts.take(order.fed[own], axis=0), out=handed_on)
            np.maximum(start, fed + upload.take(slot, axis=0), out=start)
        if is_loaded:
            loaded = (
                starts.take(order.run_before[own], axis=0) + parameters.take(slot, axis=0) * order.is_first[own, None]
            )
            np.maximum(start, loaded, out=start)
        if starts is not ends:
            starts[own] = start
        np.add(start, compute.take(slot, axis=0), out=ends[own])
    last = ends[:-1] + gradients[order.slot] * order.is_last[:, None] if gradients.any() else ends[:-1]
    return np.asarray(last.max(axis=0))


def slot_times(
    order: Order,
    layers: Sequence[LayerCost],
    cuts: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    hardware: Hardware,
    workers: int,
    *,
    resident: bool,
) -> SlotTimes:
    """Returns the times of the slots of classic pipelines, forward and backward cut alike.

    cuts      a row a plan: where its stages start, and the number of layers
    resident  stages stay on their workers, with all that these have, see `rpfunc.schedule.resident`
    All workers transfer at once. As `stage_costs` has it, for many plans.
    """
    upload = min(hardware.upload, hardware.host_upload / workers)
    download = min(hardware.download, hardware.host_download / workers)
    starts, stops = cuts[:, :-1].T, cuts[:, 1:].T
    outputs = np.array([0.0, *(layer.output_bytes for layer in layers[:-1]), 0.0], dtype=np.float64)

    def summed(field: str) -> Times:
        sums = np.array([0.0, *accumulate(getattr(layer, field) for layer in layers)], dtype=np.float64)
        return np.asarray(sums[stops] - sums[starts])

    def rows(of_kind: dict[str, Times]) -> Times:
        return np.stack([*(of_kind[kind][stage] for kind, stage in order.slots), np.zeros(len(cuts))])

    def sent(size: Times, rate: float) -> Times:
        return np.where(size > 0, size / rate + hardware.latency, 0.0)

    before, after = outputs[starts], outputs[stops]
    nothing = np.zeros_like(before)
    moved = {field: nothing if resident else summed(field) for field in ("parameter_bytes", "gradient_bytes")}
    if resident:  # backward has its stage's input, and what goes to the next stage may be there
        apart = 1 - np.array([0, *order.joined, 0])[:, None]
        before, after = before * apart[:-1], after * apart[1:]
        inputs = {"F": before, "B": after, "I": after, "W": nothing}
    else:
        inputs = {"F": before, "B": before + after, "I": before + after, "W": before + after}
    written = dict.fromkeys("BW", moved["gradient_bytes"]) | dict.fromkeys("FI", nothing)
    return SlotTimes(
        compute=rows({kind: summed(field) for kind, field in FIELDS.items()}),
        upload=sent(rows(inputs), upload),
        download=sent(rows({"F": after, "B": before, "I": before, "W": nothing}), download),
        parameters=sent(rows(dict.fromkeys("FBIW", moved["parameter_bytes"])), upload),
        gradients=sent(rows(written), download),
    )


def _feeder(task: Task, work: Workload, numbers: dict[Task, int]) -> int:
    """Returns the number of the task whose outputs a task reads, W what its I reads; that after the last for none."""
    stage, kind, m = task
    others = work.dependencies(Task(stage, "I", m) if kind == "W" else task)
    return next((numbers[other] for other in others if other.microbatch == m), len(numbers))


def _levels(needed: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the tasks in groups: first those that need none, then those that need only these, and so on."""
    followers: list[list[int]] = [[] for _ in needed]
    missing = [len(others) for others in needed]
    for number, others in enumerate(needed):
        for other in others:
            followers[other].append(number)
    levels = [[number for number, count in enumerate(missing) if not count]]
    while levels[-1]:
        ready = []
        for number in levels[-1]:
            for follower in followers[number]:
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
        levels.append(ready)
    return levels[:-1]
