"""How a schedule runs once iterations follow each other without end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rpfunc.plan.costs import StageCosts
from rpfunc.plan.hardware import COMPUTE_ONLY, Hardware
from rpfunc.schedule.simulate import simulate
from rpfunc.schedule.task import Schedule
from rpfunc.schedule.timeline import HOST, Timeline
from rpfunc.schedule.workload import Workload

MOST_ITERATIONS = 256
"""Simulated before the search for a period is given up."""


class Steady(NamedTuple):
    """A steady state.

    bubble          share of the workers' time without computation
    iteration_time  from the start of one iteration to the start of the next, on average
    period          iterations after which everything repeats, on the same workers or a `turn` further, at the same
                    times; None if no such number was found: then the rest is the average over the last half
    """

    bubble: float
    iteration_time: float
    period: int | None


def steady_state(
    generate: Callable[[Workload], Schedule],
    work: Workload,
    costs: StageCosts,
    hardware: Hardware = COMPUTE_ONLY,
    *,
    turn: int = 0,
    most: int = MOST_ITERATIONS,
    resident: bool = False,
) -> Steady:
    """Returns the steady state of the schedules that `generate` makes of ever more iterations of `work`.

    Iterations are simulated until two of them, neighbours, have run as two neighbours before did: all tasks and
    updates on the same workers, at the same times since the start of their iteration. What follows depends on nothing
    else, so all repeats from there on, and over this period the bubble is exact: 1 - work / (workers * time). The last
    iteration, which lacks a next one, is left out. Round-robin schedules come round to the same workers after
    lcm(cards, workers) / cards iterations or a multiple. Iterations that nothing holds up (forward slots alone) may
    begin ever faster than they end: then they take as long as their ends are apart.

    turn      the workers by which an iteration's tasks stand further than those of the one before, round and round: the
              number of cards, where an iteration begins where the one before has ended. Workers are alike, so it is
              enough that iterations run alike on workers so much further, which they do earlier
    most      iterations that are simulated before the search for a period is given up
    resident  stages stay on their workers, as in `simulate`

    Cost: that of simulating a few periods. Raises what `simulate` and `generate` raise.

    >>> from functools import partial
    >>> from rpfunc.plan.costs import StageCost
    >>> from rpfunc.schedule.round_robin import round_robin
    >>> costs = {("F", 0): StageCost(1), ("X", 1): StageCost(2), ("B", 0): StageCost(2)}
    >>> work = Workload([("F", 0), ("X", 1), ("B", 0)], num_microbatches=4, staleness=1)
    >>> steady_state(partial(round_robin, num_workers=2), work, costs)
    Steady(bubble=0.0, iteration_time=10.0, period=2)
    """
    num_iterations = 8
    while True:
        longer = repeated(work, num_iterations)
        schedule = generate(longer)
        timeline = simulate(schedule, costs, hardware, longer, resident=resident)
        passes = _passes(timeline, longer, turn)[:-1]
        period = _period(passes)
        if period is not None or num_iterations >= most:
            break
        num_iterations *= 2
    length = len(passes) // 2 if period is None else period
    first, last = passes[-1 - length], passes[-1]
    # the same where all repeats; iterations that begin faster than they end, since nothing holds them up, pile up
    time = max(last.start - first.start, last.end - first.end)
    busy = sum(costs[task.kind, task.stage].time for task in schedule.tasks if longer.iteration(task) == 0)
    available = timeline.num_workers * time
    return Steady(1 - length * busy / available if available else 0.0, time / length, period)


def repeated(work: Workload, num_iterations: int) -> Workload:
    """Returns the workload over so many iterations, each like the first."""
    size = work.num_microbatches
    first = [(stage, m) for stage, m in work.halved if m < size]
    halved = frozenset((stage, m + size * i) for stage, m in first for i in range(num_iterations))
    return replace(work, num_iterations=num_iterations, halved=halved)


class _Pass(NamedTuple):
    """How an iteration ran: from start to end, what ran on which worker, and at which times after the start."""

    start: float
    end: float
    places: list[tuple[object, ...]]
    times: np.ndarray[tuple[int], np.dtype[np.float64]]


def _passes(timeline: Timeline, work: Workload, turn: int) -> list[_Pass]:
    rows: list[list[tuple[str, int, str, int, int, float]]] = [[] for _ in range(work.num_iterations)]
    ends = [0.0] * work.num_iterations
    for worker, channel, (stage, kind, microbatch), start, end in timeline.events:
        if channel in ("compute", "update"):
            iteration, place = divmod(microbatch, work.num_microbatches)
            alike = worker if worker == HOST else (worker - turn * iteration) % timeline.num_workers
            rows[iteration].append((channel, stage, kind, place, alike, start))
            ends[iteration] = max(ends[iteration], end)
    passes = []
    for own, end in zip(map(sorted, rows), ends, strict=True):
        first = min(row[-1] for row in own)
        passes.append(_Pass(first, end, [row[:-1] for row in own], np.array([float(row[-1] - first) for row in own])))
    return passes


def _period(passes: list[_Pass]) -> int | None:
    """Returns the fewest iterations after which the last two passes repeat those before; None if they do not."""

    def gap(before: int) -> float:
        return passes[-1 - before].start - passes[-2 - before].start

    def same(one: _Pass, other: _Pass) -> bool:
        return one.places == other.places and np.allclose(one.times, other.times, rtol=0, atol=1e-9 * one.times.max())

    for period in range(1, len(passes) - 1):
        alike = all(same(passes[-1 - last], passes[-1 - last - period]) for last in (0, 1))
        if alike and abs(gap(0) - gap(period)) <= 1e-9 * gap(0):
            return period
    return None
