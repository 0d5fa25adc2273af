"""What has to happen when a schedule runs with transfers, and what waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rpfunc.plan.costs import StageCosts
from rpfunc.plan.hardware import Hardware
from rpfunc.schedule.runs import runs
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.timeline import HOST
from rpfunc.schedule.updates import gradient_tasks, update_read, update_task
from rpfunc.schedule.workload import Workload

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
Waits = Sequence[tuple[Numbers, Numbers]]
"""Pairs of arrays: each activity of the first is awaited by the one at the same place of the second."""


class Followers(NamedTuple):
    """Who waits for whom: for activity i, `waiting[first[i] : first[i + 1]]`. One list for all costs the least time."""

    first: list[int]
    waiting: list[int]


class Activities(NamedTuple):
    """Activities as numbers. Those of one channel are a range, in which a worker's are in the order of its tasks.

    ranges    the numbers of each of `CHANNELS`: those of activations come before those of parameters and gradients
    tasks     the task that each belongs to
    workers   where each happens
    amounts   time of a computation or update, bytes of a transfer
    awaited   how many starts and ends of others each waits for
    at_start  which others wait for its start
    at_end    which others wait for its end; of a transfer: its arrival
    """

    ranges: list[range]
    tasks: list[Task]
    workers: list[int]
    amounts: list[float]
    awaited: list[int]
    at_start: Followers
    at_end: Followers


def activities(schedule: Schedule, costs: StageCosts, hardware: Hardware, work: Workload) -> Activities:
    """Returns what a complete schedule has to do, under these rules:

    - A task is computed after the one before it on its worker, once its inputs and its run's parameters have arrived.
    - What a task hands on goes through the host, also if its own worker reads it: inputs are uploaded once the outputs
      that they are made of have been downloaded. W reads what its I read. Where a task waits only to keep order (its
      microbatch before, for sums; the I of a W), it is enough that the other has been computed.
    - Inputs are uploaded no earlier than the start of the task `prefetch` places before; a run's parameters no earlier
      than the start of the run `prefetch_runs` before, and after the update that its iteration awaits.
    - A run's gradients are downloaded after its last task. An update waits for all gradients of its iteration and for
      the update before.
    """
    tasks, own_runs = schedule.tasks, runs(schedule, costs, work)
    num_updates = len(gradient_tasks(schedule, work))
    sizes = (len(tasks), len(tasks), len(tasks), len(own_runs), len(own_runs), num_updates)
    limits = list(accumulate(sizes, initial=0))
    compute, inputs, outputs, parameters, gradients, updates = map(np.arange, limits[:-1], limits[1:])

    worker = np.repeat(np.arange(len(schedule.workers)), [len(own) for own in schedule.workers])
    prefetch, prefetch_runs = (min(ahead, len(tasks)) for ahead in (hardware.prefetch, hardware.prefetch_runs))
    next_task, fed = _later(worker, 1), _later(worker, prefetch)
    read, reader, before, after = _dependencies(tasks, work)
    run_worker, iteration, first, stop = np.array([run[:4] for run in own_runs], dtype=np.int64).T
    next_run = _later(run_worker, prefetch_runs)
    writes = np.flatnonzero([tasks[run.start].kind != "F" for run in own_runs])
    awaited = [update_read(work, run.iteration) if num_updates else None for run in own_runs]
    awaits = np.flatnonzero([update is not None for update in awaited])
    at_start = [
        (compute[fed - prefetch], inputs[fed]),
        (compute[first[next_run - prefetch_runs]], parameters[next_run]),
    ]
    at_end = [
        (compute[next_task - 1], compute[next_task]),
        (compute[before], compute[after]),
        (inputs, compute),
        (parameters, compute[first]),
        (compute, outputs),
        (outputs[read], inputs[reader]),
        (compute[stop - 1], gradients),
        (gradients[writes], updates[iteration[writes]]),
        (updates[:-1], updates[1:]),
        (updates[[update for update in awaited if update is not None]], parameters[awaits]),
    ]
    stage_costs = [costs[kind, stage] for stage, kind, _ in tasks]
    return Activities(
        ranges=list(map(range, limits[:-1], limits[1:])),
        tasks=[
            *3 * tasks,
            *(tasks[run.start] for run in own_runs),
            *(tasks[run.stop - 1] for run in own_runs),
            *(update_task(work, update) for update in range(num_updates)),
        ],
        workers=[*3 * worker.tolist(), *2 * run_worker.tolist(), *num_updates * [HOST]],
        amounts=[
            *(cost.time for cost in stage_costs),
            *(cost.input_bytes for cost in stage_costs),
            *(cost.output_bytes for cost in stage_costs),
            *(run.parameter_bytes for run in own_runs),
            *(run.gradient_bytes for run in own_runs),
            *num_updates * [hardware.update or 0],
        ],
        awaited=np.bincount(np.concatenate([then for _, then in at_start + at_end]), minlength=limits[-1]).tolist(),
        at_start=_followers(at_start, limits[-1]),
        at_end=_followers(at_end, limits[-1]),
    )


def _later(owners: Numbers, places: int) -> Numbers:
    """Returns the numbers that have another of the same owner so many places before."""
    return np.flatnonzero(owners[places:] == owners[: max(0, len(owners) - places)]) + places


def _dependencies(tasks: Sequence[Task], work: Workload) -> list[Numbers]:
    """Returns four columns: whose outputs are read, by whom; and who has to be computed before whom."""
    numbers = {task: number for number, task in enumerate(tasks)}
    columns: tuple[list[int], ...] = ([], [], [], [])
    read, reader, before, after = columns
    for number, task in enumerate(tasks):
        stage, kind, microbatch = task
        needed = work.dependencies(task)
        for other in work.dependencies(Task(stage, "I", microbatch)) if kind == "W" else needed:
            if other.microbatch == microbatch:
                read.append(numbers[other])
                reader.append(number)
        for other in needed:
            if other.microbatch != microbatch or kind == "W":
                before.append(numbers[other])
                after.append(number)
    return [np.array(column, dtype=np.int64) for column in columns]


def _followers(pairs: Waits, total: int) -> Followers:
    awaited, waiting = (np.concatenate(column) for column in zip(*pairs, strict=True))
    order = np.argsort(awaited, kind="stable")
    first = np.searchsorted(awaited[order], np.arange(total + 1))
    return Followers(first.tolist(), waiting[order].tolist())
