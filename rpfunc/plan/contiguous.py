"""The fastest contiguous partition of a classic pipeline: stages that stay on their worker, by simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rpfunc.plan.classic import classic_partition, least_bottleneck, moves
from rpfunc.plan.costs import LayerCost
from rpfunc.plan.footprint import Moment, busiest_moments, resident_bytes, streamed_bytes
from rpfunc.plan.hardware import COMPUTE_ONLY, Hardware
from rpfunc.plan.plan import Plan
from rpfunc.plan.timing import Order, makespans, order_of, slot_times
from rpfunc.schedule.task import Schedule
from rpfunc.schedule.workload import Workload

SEARCHED, SEARCHED_WIDELY = 4, 3
"""Numbers of stages whose best plan is improved, and of these, those whose best few plans are."""

WIDE = 16
"""How many plans those few are, at most."""

MOST_MOVES = 6_000
"""About how many plans a step may time, which narrows the search where there are many stages."""

AT_ONCE, MOST_TIMES = 256, 2**22
"""Plans timed together, and times of their tasks: bounds on memory."""

Cuts = tuple[int, ...]
"""Where stages start, and the number of layers."""


class Candidate(NamedTuple):
    """A plan, and how long the schedule takes with it: exactly where transfers take no time, else about.

    over  about how many bytes it passes the memory by
    """

    over: float
    time: float
    plan: Plan


class Score(NamedTuple):
    """What makes one plan better than another."""

    over: float
    time: float


@dataclass(frozen=True)
class Pipeline:
    """A classic schedule with so many stages.

    generate  returns the schedule of a workload, and the workload that it fulfils (`halve`)
    resident  stages stay on their worker, as in `simulate`
    """

    generate: Callable[[Workload, int], tuple[Schedule, Workload]]
    stages: int
    workers: int
    microbatches: int
    hardware: Hardware = COMPUTE_ONLY
    resident: bool = True

    @cached_property
    def order(self) -> Order:
        """The order of its tasks, which no plan changes."""
        return order_of(*self._generated, self.hardware)

    @cached_property
    def moments(self) -> list[tuple[list[int], list[Moment]]]:
        """When its workers have most on them, which no plan changes."""
        return busiest_moments(self._generated[0])

    @cached_property
    def _generated(self) -> tuple[Schedule, Workload]:
        plan = Plan.symmetric(self.stages, range(self.stages))
        return self.generate(Workload(plan.slots, self.microbatches), self.workers)


def fastest_plans(
    layers: Sequence[LayerCost], pipelines: Sequence[Pipeline], memory: float = math.inf
) -> list[Candidate]:
    """Returns the best plans found, of all pipelines together and of each the best, fastest first.

    memory  bytes of a worker; plans that pass it come after those that do not, the more the later. What they take is
            about right, see `rpfunc.plan.footprint`: `report` says it exactly

    A local search from balanced plans. Of those timed so far, the best few have a layer moved from each stage to each
    other, by moving the cuts between, until nothing is new. All plans of a pipeline have the same order of tasks, so
    that hundreds are timed at once. Of 13,000 random models of 4 to 11 layers it missed the fastest of all partitions
    in 3, by less than 2%. Cost: 0.3 s for 34 layers on 8 workers and all numbers of stages, 5 s for 96. Source: own.
    """
    found = [_scored(layers, pipeline, _balanced(layers, pipeline), memory) for pipeline in pipelines]
    improvable = [index for index, pipeline in enumerate(pipelines) if pipeline.stages < len(layers)]
    for number, wide in ((SEARCHED, False), (SEARCHED_WIDELY, True)):
        for index in sorted(improvable, key=lambda index: min(found[index].values()))[:number]:
            width = max(2, min(WIDE, MOST_MOVES // pipelines[index].stages ** 2)) if wide else 1
            found[index] = _improved(layers, pipelines[index], found[index], width, memory)
    together = sorted((score, cuts) for scores in found for cuts, score in scores.items())
    firsts = {min((score, cuts) for cuts, score in scores.items()) for scores in found}
    best = sorted(firsts.union(together[:WIDE]))
    return [Candidate(*score, Plan.symmetric(len(layers), cuts[:-1])) for score, cuts in best]


def _improved(
    layers: Sequence[LayerCost], pipeline: Pipeline, scores: Mapping[Cuts, Score], width: int, memory: float
) -> dict[Cuts, Score]:
    """Returns the scores of these plans and of others, until the best `width` have no neighbour without a score."""
    known = dict(scores)
    done: set[Cuts] = set()
    while front := [cuts for cuts in sorted(known, key=known.__getitem__)[:width] if cuts not in done]:
        done.update(front)
        new = {tuple(moved) for cuts in front for moved in moves(cuts).tolist()} - known.keys()
        known |= _scored(layers, pipeline, sorted(new), memory)
    return known


def _scored(layers: Sequence[LayerCost], pipeline: Pipeline, plans: Iterable[Cuts], memory: float) -> dict[Cuts, Score]:
    plans = list(plans)
    scores: dict[Cuts, Score] = {}
    together = max(1, min(AT_ONCE, MOST_TIMES // len(pipeline.order.slot)))
    for first in range(0, len(plans), together):
        group = plans[first : first + together]
        cuts = np.array(group)
        slots = slot_times(
            pipeline.order,
            layers,
            cuts,
            pipeline.hardware,
            pipeline.workers,
            resident=pipeline.resident,
        )
        times = makespans(pipeline.order, slots).tolist()
        over = _over(layers, pipeline, cuts, memory)
        scores |= zip(group, map(Score, over, times), strict=True)
    return scores


def _over(
    layers: Sequence[LayerCost],
    pipeline: Pipeline,
    cuts: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    memory: float,
) -> list[float]:
    if memory == math.inf:
        return [0.0] * len(cuts)
    found = resident_bytes(pipeline.moments, layers, cuts) if pipeline.resident else streamed_bytes(layers, cuts)
    return [*map(float, np.maximum(found - memory, 0.0))]


def _balanced(layers: Sequence[LayerCost], pipeline: Pipeline) -> Iterator[Cuts]:
    """Yields plans to start from: even by worker, by stage, and by number of layers."""
    num_layers, stages = len(layers), pipeline.stages
    by_worker = classic_partition(layers, stages, pipeline.workers)
    yield (*(span.start for span in by_worker.forward), num_layers)
    yield tuple(least_bottleneck([0, *accumulate(layer.forward + layer.backward for layer in layers)], stages))
    yield tuple(stage * num_layers // stages for stage in range(stages + 1))
