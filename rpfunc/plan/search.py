"""Choosing a plan, and how its slots are dealt, by simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from rpfunc.errors import PlanError
from rpfunc.plan.bounds import lower_bound
from rpfunc.plan.candidates import balanced_plans, deals, every_plan, neighbours
from rpfunc.plan.checks import count_problems, shown
from rpfunc.plan.clock import Candidate, Clock
from rpfunc.plan.costs import LayerCost, StageCost, layer_costs, slot_bytes, slot_costs_of
from rpfunc.plan.deal import Deal
from rpfunc.plan.hardware import COMPUTE_ONLY, Hardware
from rpfunc.plan.partition import partition
from rpfunc.plan.plan import Plan

FEW_LAYERS = 8
"""Models of so many layers have few enough plans (5,462) to try them all."""

FINALISTS = 15
"""Deals that are simulated with all transfers, where these take time."""

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

    Tries balanced stages in every number that may pay, and the published rule's plan; without `split` every plan of
    models of up to 8 layers; then moves cuts by a layer where that helps. A deal is timed only if no more than a few
    are known to be faster than it can be. Of deals that take the same time, the one that moves the fewest bytes. With
    hardware on which transfers take time, the best few are simulated with them. Stages that pass the hardware's memory
    are left out. Never worse than the rule's plan, where that has as many slots as asked for.
    Cost: up to 3 s for 94 layers, 8 workers, 16 microbatches. Raises PlanError as `partition` does. Source: own.

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
        if staleness not in (0, 1):
            raise PlanError(f"search: staleness is {shown(staleness)}, it must be 0 or 1")
        clock = Clock(self.workers, self.microbatches, self.hardware, staleness, joined)
        number = FINALISTS if self.hardware.transfers_cost else 1
        if split:
            found = clock.fastest(chain.from_iterable(map(self._dealings, self._balanced)), number)
        else:
            found = clock.fastest(self._every if len(self._layers) <= FEW_LAYERS else self._balanced, number)
        for _ in range(STEPS):
            moved = (Candidate(deal, self._slot_costs(deal.plan)) for deal in neighbours(found[0].candidate.deal))
            (best,) = clock.fastest(filter(self._fits, moved), 1, known=found[:1])
            if best == found[0]:
                break
            found = [best, *found][:number]
        # the first that is balanced is the rule's plan, if it has enough slots
        finalists = [*(each.candidate for each in found), *self._balanced[:1]]
        time, chosen = clock.exactly_fastest(finalists[: None if self.hardware.transfers_cost else 1])
        blocks = self.microbatches if split else 1
        bound = lower_bound(self._layers, self.workers, self.microbatches, num_blocks=blocks, staleness=staleness)
        return Found(chosen.deal, time, bound)

    @cached_property
    def _layers(self) -> list[LayerCost]:
        return layer_costs(self.costs)

    @cached_property
    def _slot_costs(self) -> Callable[[Plan], list[StageCost]]:
        return slot_costs_of(self._layers)

    @cached_property
    def _rule(self) -> Plan:
        memory = None if self.hardware.memory_bytes == math.inf else self.hardware.memory_bytes
        return partition(self._layers, self.workers, self.microbatches, memory)

    @cached_property
    def _balanced(self) -> list[Candidate]:
        return self._allowed(balanced_plans(self._layers, self.workers))

    @cached_property
    def _every(self) -> list[Candidate]:
        return self._allowed(every_plan(len(self._layers)))

    def _allowed(self, plans: Iterable[Plan]) -> list[Candidate]:
        """Returns of the rule's plan and others those that fit and have enough slots; the rule's if there are none."""
        candidates = filter(self._fits, map(self._once, dict.fromkeys([self._rule, *plans])))
        least = min(self.least_slots, 2 * len(self._layers) - 1)
        return [each for each in candidates if len(each.slots) >= least] or [self._once(self._rule)]

    def _fits(self, candidate: Candidate) -> bool:
        return all(slot_bytes(slot) <= self.hardware.memory_bytes for slot in candidate.slots)

    def _once(self, plan: Plan) -> Candidate:
        """Returns a plan, each slot dealt to one worker."""
        return Candidate(Deal(plan, (1,) * len(plan.slots)), self._slot_costs(plan))

    def _dealings(self, once: Candidate) -> Iterator[Candidate]:
        """Yields the plan of a candidate, dealt in every way that is worth a try."""
        times = [slot.time for slot in once.slots]
        for deal in deals(once.deal.plan, times, self.workers, self.microbatches):
            yield Candidate(deal, once.slots)
