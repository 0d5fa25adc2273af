"""Choosing a plan, and how its slots are dealt, by simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from rpfunc.checks import count_problems, is_whole, shown
from rpfunc.errors import PlanError
from rpfunc.plan.bounds import lower_bound
from rpfunc.plan.candidates import balanced_plans, deals, every_plan, neighbours
from rpfunc.plan.clock import Candidate, Clock, Simulated
from rpfunc.plan.costs import LayerCost, StageCost, layer_costs, slot_costs_of
from rpfunc.plan.deal import Deal
from rpfunc.plan.hardware import COMPUTE_ONLY, Hardware
from rpfunc.plan.held import Ahead, most_worker_bytes, worker_bytes
from rpfunc.plan.partition import Models
from rpfunc.plan.plan import Plan

FEW_LAYERS = 8
"""Models of so many layers have few enough plans (5,462) to try them all."""

FINALISTS = 15
"""Deals that are simulated with all transfers, where these take time."""

LIMITS = 3
"""How often plans are looked for, each time held to less, where transfers that fall behind fill the memory."""

MOST_LAYERS, MOST_DEALT = 2_000, 10**5
"""Layers, and layers times workers or microbatches: more would take hours."""

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
    least_slots  plans have at least so many slots, as far as layers and memory allow. Computation alone is fastest
                 where each worker runs the whole model on microbatches of its own (data parallelism): ask for as many
                 slots as workers for a pipeline, whose workers hold a part of the model at a time

    Tries balanced stages in every number that may pay, and the published rule's plan; every plan of models of up to 8
    layers, each slot on one worker; then moves cuts by a layer where that helps. A deal is timed only if no more than a
    few are known to be faster than it can be. Of deals that take the same time, the one that moves the fewest bytes.
    With hardware on which transfers take time, the best few are simulated with them.

    Under a limit, what comes out is held to `worker_bytes`, and where transfers take time to the simulated peak (of
    four iterations, if joined): links that do not keep up hold more. Where all of the best few pass the limit, plans
    are held to less; in the end each slot has one layer, or the only slot all.
    Never worse than the rule's plan, where that has as many slots as asked for and keeps the memory.
    Cost: up to 3 s for 94 layers, 8 workers, 16 microbatches. Raises PlanError for what cannot be; if memory does not
    do, naming each layer that alone passes it, and a limit that would do. Source: own.

    >>> found = search([1.0] * 8 + [2.0], workers=2, microbatches=4, split=False)
    >>> found.deal.ways == (1,) * len(found.deal.plan.slots), found.time >= found.lower_bound
    (True, True)
    """
    return Space(costs, workers, microbatches, hardware, least_slots).search(staleness, joined=joined, split=split)


@dataclass(frozen=True)
class Space:
    """What there is to choose from for a model on a machine; searches in different ways share it.

    Arguments and errors as `search` has them.
    """

    costs: Sequence[LayerCost | float]
    workers: int
    microbatches: int
    hardware: Hardware = COMPUTE_ONLY
    least_slots: int = 1

    def __post_init__(self) -> None:
        num_layers = len(self._layers)
        counts = {"workers": self.workers, "microbatches": self.microbatches}
        problems = [
            f"{problem} for {num_layers} layers" if "most" in problem else problem
            for problem in count_problems(counts, most=MOST_DEALT // num_layers)
        ]
        problems += count_problems({"the number of layers": num_layers}, most=MOST_LAYERS)
        problems += count_problems({"least_slots": self.least_slots})
        if problems:
            raise PlanError.listing("search", problems)

    def search(self, staleness: int = 0, *, joined: bool = False, split: bool = True) -> Found:
        """Returns what `search` finds here."""
        if not is_whole(staleness) or staleness not in (0, 1):
            raise PlanError(f"search: staleness is {shown(staleness)}, it must be 0 or 1")
        clock = Clock(self.workers, self.microbatches, self.hardware, staleness, joined)
        blocks = self.microbatches if split else 1
        bound = lower_bound(self._layers, self.workers, self.microbatches, num_blocks=blocks, staleness=staleness)
        time, _, chosen = self._fastest(clock, split)
        return Found(chosen.deal, time, bound)

    def _fastest(self, clock: Clock, split: bool) -> Simulated:
        """Returns the fastest found that keeps the memory. Where links do not keep up, plans are held to less."""
        memory, models = self.hardware.memory_bytes, self._models(clock.joined)
        if memory == math.inf:
            return clock.exactly_fastest(self._finalists(clock, split, memory))
        least = models.bytes_of(models.smallest)
        limit, step = memory, 0.0
        for _ in range(LIMITS):
            if limit < least:
                break
            found = clock.exactly_fastest(self._finalists(clock, split, limit))
            if found.peak <= memory:
                return found
            step = max(found.peak - memory, 2 * step)
            limit -= step
        found = clock.simulated(self._once(*models.smallest))
        if max(least, found.peak) > memory:
            raise models.too_little(memory, "search", max(least, found.peak))
        return found

    def _finalists(self, clock: Clock, split: bool, limit: float) -> list[Candidate]:
        """Returns those that are worth being simulated, the fastest first; the one alone if transfers take no time."""
        (rule,) = self._models(clock.joined).within(limit)

        def fits(candidate: Candidate) -> bool:
            return self._fits(candidate, clock.joined, limit)

        def allowed(candidates: Iterable[Candidate]) -> list[Candidate]:
            """Returns the rule's plan and others, if they fit and have enough slots; the rule's if none has."""
            first, least = self._once(rule), min(self.least_slots, 2 * len(self._layers) - 1)
            plans = {rule: first} | {each.deal.plan: each for each in candidates if fits(each)}
            return [each for each in plans.values() if len(each.slots) >= least] or [first]

        balanced = allowed([*self._balanced, self._layer_each])
        undealt = allowed(self._every) if len(self._layers) <= FEW_LAYERS else balanced
        number = FINALISTS if self.hardware.transfers_cost else 1
        if split:
            known = {each.deal.plan for each in balanced}
            dealt = chain.from_iterable(self._dealings(each, clock.joined, limit) for each in balanced)
            found = clock.fastest(chain(dealt, (each for each in undealt if each.deal.plan not in known)), number)
        else:
            found = clock.fastest(undealt, number)
        for _ in range(STEPS):
            moved = (Candidate(deal, self._slot_costs(deal.plan)) for deal in neighbours(found[0].candidate.deal))
            (best,) = clock.fastest(filter(fits, moved), 1, known=found[:1])
            if best == found[0]:
                break
            found = [best, *found][:number]
        # the first that is balanced is the rule's plan, if it has enough slots
        finalists = [*(each.candidate for each in found), *balanced[:1]]
        return finalists[: None if self.hardware.transfers_cost else 1]

    @cached_property
    def _layers(self) -> list[LayerCost]:
        return layer_costs(self.costs)

    @cached_property
    def _slot_costs(self) -> Callable[[Plan], list[StageCost]]:
        return slot_costs_of(self._layers)

    @cached_property
    def _balanced(self) -> list[Candidate]:
        return list(map(self._once, dict.fromkeys(balanced_plans(self._layers, self.workers))))

    @property
    def _layer_each(self) -> Candidate:
        """The plan of the most slots, each of one layer."""
        starts = range(len(self._layers))
        return self._once(Plan.cut(len(starts), forward=starts, backward=starts))

    @cached_property
    def _every(self) -> list[Candidate]:
        return list(map(self._once, every_plan(len(self._layers))))

    @property
    def _ahead(self) -> Ahead:
        """How far uploads may be ahead; no further than the end of the iteration after the next."""
        most_runs = 4 * len(self._layers)
        return Ahead(
            min(self.hardware.prefetch, most_runs * self.microbatches), min(self.hardware.prefetch_runs, most_runs)
        )

    def _models(self, joined: bool) -> Models:
        busy = min(self.workers, self.microbatches)
        return Models([self._layers], [True], self.workers, busy, joined, self._ahead)

    def _fits(self, candidate: Candidate, joined: bool, limit: float) -> bool:
        if limit == math.inf or most_worker_bytes(candidate.slots, self._ahead) <= limit:
            return True
        ways = candidate.deal.ways
        held = worker_bytes(candidate.slots, self.workers, ways, joined=joined, ahead=self._ahead)
        return bool(held.max() <= limit)

    def _once(self, plan: Plan) -> Candidate:
        """Returns a plan, each slot dealt to one worker."""
        return Candidate(Deal(plan, (1,) * len(plan.slots)), self._slot_costs(plan))

    def _dealings(self, once: Candidate, joined: bool, limit: float) -> Iterator[Candidate]:
        """Yields the plan of a candidate, dealt in every way that is worth a try and fits."""
        times = [slot.time for slot in once.slots]
        anyway = limit == math.inf or most_worker_bytes(once.slots, self._ahead) <= limit
        for deal in deals(once.deal.plan, times, self.workers, self.microbatches):
            candidate = Candidate(deal, once.slots)
            if anyway or self._fits(candidate, joined, limit):
                yield candidate
