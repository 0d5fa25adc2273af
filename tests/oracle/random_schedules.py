"""Hypothesis strategy for whatever may be simulated: any plan, any order that ends, on any workers, at any costs."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from hypothesis import strategies as st

from rpfunc import Plan
from rpfunc.plan.costs import StageCost
from rpfunc.plan.hardware import Hardware
from rpfunc.schedule import Schedule, Task, Workload
from rpfunc.testing import strategies


class Case(NamedTuple):
    schedule: Schedule
    costs: dict[tuple[str, int], StageCost]
    hardware: Hardware
    work: Workload


@st.composite
def cases(draw: st.DrawFn, transfers: bool = True, shared: bool = True, iterations: int = 3) -> Case:
    """Draws a case. All numbers are fractions, so that two simulators can be asked for equal times."""
    work = draw(workloads(iterations))
    choose = random.Random(draw(st.integers(0, 2**32)))
    schedule = random_schedule(work, draw(st.integers(1, 4)), choose)
    return _case(draw, schedule, work, choose, transfers=transfers, shared=shared)


@st.composite
def bound_cases(draw: st.DrawFn, iterations: int = 3) -> Case:
    """Draws a case whose stages stand on one worker each, with plans that are cut alike forward and backward."""
    work = draw(workloads(iterations, alike=True))
    choose = random.Random(draw(st.integers(0, 2**32)))
    num_workers = draw(st.integers(1, 4))
    homes = {stage: choose.randrange(num_workers) for _, stage in work.slots}
    return _case(draw, random_schedule(work, num_workers, choose, homes), work, choose)


def _case(
    draw: st.DrawFn,
    schedule: Schedule,
    work: Workload,
    choose: random.Random,
    transfers: bool = True,
    shared: bool = True,
) -> Case:
    costs = {(kind, stage): random_cost(kind, choose) for stage, kind, _ in schedule.tasks}
    rates = [Fraction(choose.randint(1, 4)) for _ in range(4)]
    hardware = Hardware(
        upload=rates[0],
        download=rates[1],
        host_upload=rates[2] * 2 if shared else math.inf,
        host_download=rates[3] * 2 if shared else math.inf,
        latency=Fraction(choose.choice((0, 0, 1, 3))),
        prefetch=draw(st.integers(1, 3)),
        prefetch_runs=draw(st.integers(1, 3)),
        update=Fraction(choose.randint(0, 9)),
    )
    return Case(schedule, costs, hardware if transfers else Hardware(update=hardware.update), work)


@st.composite
def workloads(draw: st.DrawFn, iterations: int, alike: bool = False) -> Workload:
    num_layers, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    symmetric = st.just(Plan.symmetric(num_layers, range(num_layers)))
    fused = st.just(Plan.cut(num_layers, range(num_layers), range(num_layers)))
    plan = draw(symmetric | (fused if alike else strategies.plans(num_layers)))
    num_iterations = draw(st.integers(1, iterations))
    backward = [(stage, m) for stage in range(num_layers) for m in range(num_microbatches * num_iterations)]
    return Workload(
        plan.slots,
        num_microbatches,
        num_blocks=draw(st.integers(1, num_microbatches)),
        num_iterations=num_iterations,
        staleness=draw(st.integers(0, 1)),
        halved=frozenset(draw(st.just([]) | st.just(backward) | st.sets(st.sampled_from(backward)))),
    )


def random_schedule(
    work: Workload, num_workers: int, choose: random.Random, homes: Mapping[int, int] | None = None
) -> Schedule:
    """Returns any order in which all tasks can run, cut at any points into the lists of the workers.

    homes  the worker of each stage, if it has one
    """
    workers: list[list[Task]] = [[] for _ in range(num_workers)]
    left, done = work.tasks, set[Task]()
    steadiness = choose.choice((0.0, 0.5, 0.9, 1.0))
    worker, slot = 0, ("", 0)
    while left:
        updated = min((work.iteration(task) for task in left if task.kind in "XBW"), default=work.num_iterations)
        ready = [task for task in left if done.issuperset(work.dependencies(task))]
        ready = [task for task in ready if work.awaited_update(task) is None or work.awaited_update(task) < updated]
        same = [task for task in ready if (task.kind.replace("W", "I"), task.stage) == slot]
        if not same or choose.random() > steadiness:
            worker, same = choose.randrange(num_workers), ready
        task = choose.choice(same)
        slot = task.kind.replace("W", "I"), task.stage
        workers[worker if homes is None else homes[task.stage]].append(task)
        left.remove(task)
        done.add(task)
    return Schedule(tuple(map(tuple, workers)))


def random_cost(kind: str, choose: random.Random) -> StageCost:
    def size(most: int) -> Fraction:
        return Fraction(choose.choice((0, choose.randint(1, most), choose.randint(1, most))))

    return StageCost(
        time=size(6),
        parameter_bytes=size(12),
        gradient_bytes=size(12) if kind in "XBW" else Fraction(0),
        input_bytes=size(6),
        output_bytes=size(6),
        working_bytes=size(6),
    )
