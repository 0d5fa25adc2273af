"""How long deals take, and the fastest of many: timed only where no bound says that others are faster."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from rpfunc.plan.costs import StageCost
from rpfunc.plan.deal import Deal, iteration_ends, least_time
from rpfunc.plan.filling import ROUNDING
from rpfunc.plan.hardware import Hardware
from rpfunc.schedule.simulate import simulate
from rpfunc.schedule.steady import steady_state

WARM_UP = 4
"""Joined iterations before those that are timed: within the first few most deals settle."""

REPEATED = 3
"""Of these, how many must take as long as those a period before."""

MOST_AVERAGED = 64
"""Iterations that are averaged even where the deal comes round later."""

MOST_SIMULATED = 10**6
"""Tasks of all iterations that are simulated, where eight have no more."""

LONGEST = 4
"""Up to how many times as many are timed where they do not."""


class Candidate(NamedTuple):
    """A deal, and what its slots cost."""

    deal: Deal
    slots: Sequence[StageCost]

    @property
    def moved(self) -> float:
        """Bytes of parameters and gradients that an iteration moves; where there are none, the number of cards."""
        sizes = zip(self.deal.ways, self.slots, strict=True)
        moved = sum(ways * (slot.parameter_bytes + slot.gradient_bytes) for ways, slot in sizes)
        return moved or float(self.deal.num_cards)

    def paces(self, workers: int, microbatches: int, hardware: Hardware) -> list[float]:
        """Returns what a microbatch of each slot takes where transfers go on beside computation: the longest of them.

        A card's parameters and gradients are shared by its microbatches. All workers transfer at once.
        """
        if not hardware.transfers_cost:
            return [slot.time for slot in self.slots]
        up = min(hardware.upload, hardware.host_upload / workers)
        down = min(hardware.download, hardware.host_download / workers)
        paces = []
        for ways, slot in zip(self.deal.ways, self.slots, strict=True):
            size = microbatches // ways
            upload = (slot.parameter_bytes / size + slot.input_bytes) / up
            download = (slot.gradient_bytes / size + slot.output_bytes) / down
            paces.append(max(slot.time, upload, download))
        return paces


class Timed(NamedTuple):
    """A candidate, after what it is ranked by: its time, the bytes that it moves, its place among those tried."""

    time: float
    moved: float
    place: int
    candidate: Candidate


@dataclass(frozen=True)
class Clock:
    """How long an iteration takes: a single one, or, where they are joined, one of many."""

    workers: int
    microbatches: int
    hardware: Hardware
    staleness: int
    joined: bool

    def fastest(self, candidates: Iterable[Candidate], number: int, known: Sequence[Timed] = ()) -> list[Timed]:
        """Returns so many of these candidates and of those known, in order, at `paces`; of equals the first.

        Goes by the times that they do not go below, until those are beyond the time of as many as are asked for.
        """
        found = sorted(known)
        places = enumerate(candidates, start=1 + max((each.place for each in known), default=-1))
        bounded = [(self._least(each, self._paces(each)), place, each) for place, each in places]
        for least, place, candidate in sorted(bounded):
            if len(found) >= number and least > found[number - 1].time * (1 + 8 * ROUNDING):
                break
            # sums of floating-point times differ in their last bits
            time = float(f"{self._time(candidate, self._paces(candidate)):.9g}")
            insort(found, Timed(time, candidate.moved, place, candidate))
        return found[:number]

    def exactly_fastest(self, candidates: Iterable[Candidate]) -> tuple[float, Candidate]:
        """Returns the least time by simulation, with all transfers, and whose it is, of one candidate or more.

        Goes by what they take without transfers, where a single iteration begins once its first parameters are there;
        until that is beyond the best time found.
        """
        bounded = []
        for candidate in candidates:
            least = self._time(candidate, [slot.time for slot in candidate.slots])
            first = candidate.slots[0].parameter_bytes / self.hardware.upload
            bounded.append((least if self.joined else least + first, candidate))
        best, fastest = math.inf, bounded[0][1]
        for least, candidate in sorted(bounded, key=lambda bound: bound[0]):
            if least * (1 + 8 * ROUNDING) >= best:
                break
            time = self._exact(candidate)
            if time < best:
                best, fastest = time, candidate
        return best, fastest

    def _exact(self, candidate: Candidate) -> float:
        """Returns the time by simulation, with all transfers."""
        deal, costs = candidate.deal, dict(zip(candidate.deal.plan.slots, candidate.slots, strict=True))
        work = deal.workload(self.microbatches, staleness=self.staleness)
        generate = partial(deal.schedule, num_workers=self.workers)
        if not self.joined:
            return simulate(generate(work), costs, self.hardware, work).makespan_s
        affordable = max(8, MOST_SIMULATED // work.num_tasks)
        fewest = min(max(8, 2 * deal.period(self.workers)), affordable)
        most = min(LONGEST * fewest, affordable)
        return steady_state(generate, work, costs, self.hardware, fewest=fewest, most=most).iteration_time

    def _time(self, candidate: Candidate, times: Sequence[float]) -> float:
        """Returns the time if a microbatch of the slots takes these."""

        def ends(num_iterations: int) -> list[float]:
            return iteration_ends(
                candidate.deal,
                times,
                self.workers,
                self.microbatches,
                num_iterations=num_iterations,
                staleness=self.staleness,
                update=self.hardware.update,
            )

        if not self.joined:
            return ends(1)[0]
        period = math.lcm(candidate.deal.period(self.workers), 1 + self.staleness)
        return settled_time(ends, min(period, MOST_AVERAGED))

    def _least(self, candidate: Candidate, times: Sequence[float]) -> float:
        """Returns a time that this one does not go below; iterations that wait for each other are as single ones."""
        joined = self.joined and self.staleness > 0
        return least_time(candidate.deal, times, self.workers, self.microbatches, joined=joined)

    def _paces(self, candidate: Candidate) -> list[float]:
        return candidate.paces(self.workers, self.microbatches, self.hardware)


def settled_time(ends: Callable[[int], list[float]], period: int) -> float:
    """Returns the average time of joined iterations over whole periods, once these repeat.

    ends    a function from a number of iterations to their ends
    period  after so many, all is dealt to the same workers again
    What begins to repeat is taken for what goes on; of iterations that never do, the last half counts.
    """
    number = fewest = WARM_UP + period + REPEATED + 2
    while True:
        found = ends(number)[:-1]  # the last one has none behind it that takes its share of links
        gaps = [after - before for before, after in pairwise(found)]
        for turn in range(period, len(gaps) - REPEATED + 1, period):
            repeated = zip(gaps[-REPEATED:], gaps[-REPEATED - turn : -turn], strict=True)
            if all(abs(gap - before) <= ROUNDING * found[-1] for gap, before in repeated):
                return sum(gaps[-turn:]) / turn
        if number >= LONGEST * fewest:
            last = gaps[-max(1, len(gaps) // 2 // period) * period :]
            return sum(last) / len(last)
        number *= 2
