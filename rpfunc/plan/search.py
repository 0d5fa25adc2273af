"""Choosing a plan, and how its slots are dealt, by simulated time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from rpfunc.errors import PlanError
from rpfunc.plan.bounds import lower_bound
from rpfunc.plan.candidates import balanced_plans, deals, every_plan, neighbours
from rpfunc.plan.checks import count_problems, shown
from rpfunc.plan.costs import LayerCost, StageCost, StageCosts, layer_costs, slot_bytes, stage_costs
from rpfunc.plan.deal import Deal, iteration_ends
from rpfunc.plan.hardware import COMPUTE_ONLY, Hardware
from rpfunc.plan.partition import partition
from rpfunc.plan.plan import Plan
from rpfunc.schedule.simulate import simulate

FEW_LAYERS = 8
"""Models of so many layers have few enough plans (5,462) to try them all."""

WARM_UP = 4
"""Joined iterations before those that are timed: within the first few they settle."""

FINALISTS = 120
"""Deals that are timed over whole periods, after all have been over two iterations."""

MOST_DEALT = 10**6
"""Workers and microbatches: more would take days."""

STEPS = 3
"""How often the best deal's cuts are moved."""


@dataclass(frozen=True)
class Found:
    """What `search` found: a deal, its time for an iteration, and a time that no deal goes below.

    So it is at most time / lower_bound - 1 slower than the best there is.
    """

    deal: Deal
    time: float
    lower_bound: float


def search(
    costs: Sequence[LayerCost | float],
    workers: int,
    microbatches: int,
    hardware: Hardware = COMPUTE_ONLY,
    *,
    staleness: int = 0,
    joined: bool = False,
    split: bool = True,
    least_slots: int = 1,
) -> Found:
    """Returns the plan, and the deal of its slots, whose iterations take the least simulated time.

    joined       iterations follow each other without a gap, and the time is their average over whole periods of the
                 deal; else it is the makespan of a single one
    split        slots may be dealt to several workers (`split_dispatch`); else each goes to one (`round_robin`)
    least_slots  plans have at least so many slots, as far as there are layers. Computation alone is fastest where each
                 worker runs the whole model on microbatches of its own (data parallelism): ask for as many slots as
                 workers for a pipeline, whose workers hold a part of the model at a time

    Tries balanced stages in every number that may pay, and the published rule's plan; without `split` every plan of
    models of up to 8 layers; then moves cuts by a layer where that helps. Of deals that take the same time, the one
    that moves the fewest bytes. With hardware on which transfers take time, the best few are simulated with them.
    Stages that pass the hardware's memory are left out. Never worse than the rule's plan.
    Cost: up to 3 s for 94 layers, 8 workers, 16 microbatches. Raises PlanError as `partition` does. Source: own.

    >>> found = search([1.0] * 8 + [2.0], workers=2, microbatches=4, split=False)
    >>> found.deal.ways == (1,) * len(found.deal.plan.slots), found.time >= found.lower_bound
    (True, True)
    """
    layers = layer_costs(costs)
    problems = count_problems({"workers": workers, "microbatches": microbatches}, most=MOST_DEALT)
    problems += count_problems({"least_slots": least_slots})
    if staleness not in (0, 1):
        problems.append(f"staleness is {shown(staleness)}, it must be 0 or 1")
    if problems:
        raise PlanError.listing("search", problems)
    memory = None if hardware.memory_bytes == math.inf else hardware.memory_bytes
    rule = partition(layers, workers, microbatches, memory)
    clock = _Clock(workers, microbatches, hardware, staleness, joined)
    if len(layers) <= FEW_LAYERS and not split:
        plans: Iterable[Plan] = every_plan(len(layers))
    else:
        plans = chain([rule], balanced_plans(layers, workers))
    plans = (plan for plan in dict.fromkeys(plans) if len(plan.slots) >= min(least_slots, 2 * len(layers) - 1))
    found = [
        candidate
        for once in _candidates((Deal(plan, (1,) * len(plan.slots)) for plan in plans), layers, hardware)
        for candidate in (once.dealings(workers, microbatches) if split else [once])
    ]
    (published,) = _candidates([Deal(rule, (1,) * len(rule.slots))], layers, hardware)
    found = [*sorted(found, key=clock.quick)[:FINALISTS], published]
    best = min(found, key=clock.rank)
    for _ in range(STEPS):
        found.append(min((best, *_candidates(neighbours(best.deal), layers, hardware)), key=clock.rank))
        if found[-1] == best:
            break
        best = found[-1]
    if hardware.transfers_cost:
        best = min([*sorted(found, key=clock.rank)[: FINALISTS // 8], published], key=clock.exact)
    blocks = microbatches if split else 1
    bound = lower_bound(layers, workers, microbatches, num_blocks=blocks, staleness=staleness)
    return Found(best.deal, clock.exact(best), bound)


class _Candidate(NamedTuple):
    """A deal and what its plan's stages cost."""

    deal: Deal
    costs: StageCosts

    @property
    def slots(self) -> list[StageCost]:
        """The costs of the slots, in order."""
        return [self.costs[slot] for slot in self.deal.plan.slots]

    def paces(self, microbatches: int, hardware: Hardware) -> list[float]:
        """Returns what a microbatch of each slot takes where transfers go on beside computation: the longest of them.

        A card's parameters and gradients are shared by its microbatches.
        """
        paces = []
        for ways, slot in zip(self.deal.ways, self.slots, strict=True):
            size = microbatches // ways
            upload = (slot.parameter_bytes / size + slot.input_bytes) / hardware.upload
            download = (slot.gradient_bytes / size + slot.output_bytes) / hardware.download
            paces.append(max(slot.time, upload, download))
        return paces

    def dealings(self, workers: int, microbatches: int) -> Iterator[_Candidate]:
        """Yields the same plan, dealt in every way that is worth a try."""
        for deal in deals(self.deal.plan, [slot.time for slot in self.slots], workers, microbatches):
            yield _Candidate(deal, self.costs)


def _candidates(found: Iterable[Deal], layers: Sequence[LayerCost], hardware: Hardware) -> Iterator[_Candidate]:
    """Yields those deals whose slots fit a worker's memory."""
    for deal in found:
        candidate = _Candidate(deal, stage_costs(deal.plan, layers))
        if all(slot_bytes(slot) <= hardware.memory_bytes for slot in candidate.slots):
            yield candidate


@dataclass(frozen=True)
class _Clock:
    """How long candidates take, and what they move."""

    workers: int
    microbatches: int
    hardware: Hardware
    staleness: int
    joined: bool

    def quick(self, candidate: _Candidate) -> tuple[float, float]:
        """Returns (time, bytes moved) of a single iteration or of the first few that are joined, at `paces`."""
        return self._ranked(candidate, 3 if self.joined else 1, 0)

    def rank(self, candidate: _Candidate) -> tuple[float, float]:
        """Returns the same, over whole periods where iterations are joined."""
        if not self.joined:
            return self.quick(candidate)
        return self._ranked(candidate, self._iterations(candidate.deal), WARM_UP)

    def exact(self, candidate: _Candidate) -> float:
        """Returns the time with all transfers."""
        if not self.hardware.transfers_cost:
            return self.rank(candidate)[0]
        deal = candidate.deal
        iterations, first = (self._iterations(deal), WARM_UP) if self.joined else (1, 0)
        work = deal.workload(self.microbatches, num_iterations=iterations, staleness=self.staleness)
        timeline = simulate(deal.schedule(work, self.workers), candidate.costs, self.hardware, work)
        return _average([event.end_s for event in timeline.events if event.channel == "update"], first)

    def _iterations(self, deal: Deal) -> int:
        """Returns how many joined iterations are simulated: some, then whole periods of the deal and of the updates."""
        return WARM_UP + math.lcm(deal.period(self.workers), 1 + self.staleness) + 1

    def _ranked(self, candidate: _Candidate, iterations: int, first: int) -> tuple[float, float]:
        slots, deal = candidate.slots, candidate.deal
        ends = iteration_ends(
            deal,
            candidate.paces(self.microbatches, self.hardware),
            self.workers,
            self.microbatches,
            num_iterations=iterations,
            staleness=self.staleness,
            update=self.hardware.update,
        )
        moved = sum(
            ways * (slot.parameter_bytes + slot.gradient_bytes) for ways, slot in zip(deal.ways, slots, strict=True)
        )
        # sums of floating-point times differ in their last bits
        return float(f"{_average(ends, first):.9g}"), moved or float(deal.num_cards)


def _average(ends: Sequence[float], first: int) -> float:
    """Returns the time of an iteration after the first few, or from the start of all."""
    return ends[-1] if len(ends) == 1 else (ends[-1] - ends[first]) / (len(ends) - 1 - first)
