"""How long deals take, and the fastest of many: timed only where no bound says that others are faster."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from rpfunc.plan.costs import StageCost, StageCosts
from rpfunc.plan.deal import Deal, Pass, least_time, passes
from rpfunc.plan.filling import ROUNDING
from rpfunc.plan.hardware import Hardware
from rpfunc.schedule.peaks import peak_bytes
from rpfunc.schedule.simulate import simulate
from rpfunc.schedule.steady import steady_state

MOST_TIMED, MOST_SIMULATED = 32, 64
"""Joined iterations that are timed until they repeat: without transfers, and with them."""

MOST_TASKS = 2 * 10**5
"""Tasks of all iterations that are simulated, unless eight iterations have more."""


ITERATIONS_HELD = 4
"""Joined iterations that are simulated for the bytes on workers: what gathers has gone before the second next one."""


class Candidate(NamedTuple):
    """A deal, and what its slots cost."""

    deal: Deal
    slots: Sequence[StageCost]

    @property
    def costs(self) -> StageCosts:
        """The costs, by (kind, stage)."""
        return dict(zip(self.deal.plan.slots, self.slots, strict=True))

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


class Simulated(NamedTuple):
    """A candidate, its time, and the most bytes that it has on a worker."""

    time: float
    peak: float
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
            time = _rounded(self._time(candidate, self._paces(candidate)))
            insort(found, Timed(time, candidate.moved, place, candidate))
        return found[:number]

    def exactly_fastest(self, candidates: Iterable[Candidate]) -> Simulated:
        """Returns of those that keep the memory the first with the least time by simulation, with all transfers.

        Goes by what they take without transfers, where a single iteration begins once its first parameters are there;
        until that is beyond the best time found. If none keeps the memory: the one whose peak is the lowest.
        """
        bounded = []
        for candidate in candidates:
            least = self._time(candidate, [slot.time for slot in candidate.slots])
            first = candidate.slots[0].parameter_bytes / self.hardware.upload
            bounded.append((_rounded(least if self.joined else least + first), candidate))
        best: Simulated | None = None
        lowest: Simulated | None = None
        for least, candidate in sorted(bounded, key=lambda bound: bound[0]):
            if best and least * (1 + 8 * ROUNDING) >= best.time:
                break
            time = self._exact(candidate)
            if best is None or time * (1 + 8 * ROUNDING) < best.time:
                found = Simulated(time, self.peak(candidate), candidate)
                if found.peak <= self.hardware.memory_bytes:
                    best = found
                elif lowest is None or found.peak < lowest.peak:
                    lowest = found
        chosen = best or lowest
        assert chosen is not None, "needs at least one candidate"
        return chosen

    def simulated(self, candidate: Candidate) -> Simulated:
        """Returns a candidate with its time and peak."""
        return Simulated(self._exact(candidate), self.peak(candidate), candidate)

    def peak(self, candidate: Candidate) -> float:
        """Returns the most bytes on a worker by simulation, in four iterations where they are joined.

        0 where memory is not limited, or where transfers take no time: then `worker_bytes` is known not to be passed.
        """
        if self.hardware.memory_bytes == math.inf or not self.hardware.transfers_cost:
            return 0.0
        deal, costs = candidate.deal, candidate.costs
        num_iterations = ITERATIONS_HELD if self.joined else 1
        work = deal.workload(self.microbatches, num_iterations=num_iterations, staleness=self.staleness)
        schedule = deal.schedule(work, self.workers)
        return max(peak_bytes(simulate(schedule, costs, self.hardware, work), schedule, costs, work))

    def _exact(self, candidate: Candidate) -> float:
        """Returns the time by simulation, with all transfers."""
        deal, costs = candidate.deal, candidate.costs
        work = deal.workload(self.microbatches, staleness=self.staleness)
        generate = partial(deal.schedule, num_workers=self.workers)
        if not self.joined:
            return simulate(generate(work), costs, self.hardware, work).makespan_s
        most = min(MOST_SIMULATED, MOST_TASKS // work.num_tasks)
        return steady_state(generate, work, costs, self.hardware, turn=deal.num_cards, most=most).iteration_time

    def _time(self, candidate: Candidate, times: Sequence[float]) -> float:
        """Returns the time if a microbatch of the slots takes these."""
        ended = passes(
            candidate.deal,
            times,
            self.workers,
            self.microbatches,
            joined=self.joined,
            staleness=self.staleness,
            update=self.hardware.update,
        )
        return settled_time(ended, self.staleness) if self.joined else next(ended).end

    def _least(self, candidate: Candidate, times: Sequence[float]) -> float:
        """Returns a time that this one does not go below; iterations that wait for each other are as single ones."""
        joined = self.joined and self.staleness > 0
        return least_time(candidate.deal, times, self.workers, self.microbatches, joined=joined)

    def _paces(self, candidate: Candidate) -> list[float]:
        return candidate.paces(self.workers, self.microbatches, self.hardware)


def _rounded(time: float) -> float:
    """Returns a time to nine digits: sums of floating-point times differ in their last bits."""
    return float(f"{time:.9g}")


def settled_time(ended: Iterator[Pass], staleness: int) -> float:
    """Returns the average time of joined iterations once everything repeats; if it does not, over the last half.

    What follows an iteration depends on when its update and the one before have ended, and on when workers and sums are
    free, if that is later than the next iteration may begin.
    """
    ends = [0.0] * (1 + staleness)
    states: list[list[float]] = []
    for end, free, taken in islice(ended, MOST_TIMED):
        ends.append(end)
        begin = ends[-1 - staleness]
        state = [max(begin, time) - end for time in (begin, *free, *taken)]
        for back, other in enumerate(reversed(states), start=1):
            if all(abs(one - two) <= ROUNDING * end for one, two in zip(state, other, strict=True)):
                return (end - ends[-1 - back]) / back
        states.append(state)
    half = len(states) // 2
    return (ends[-1] - ends[-1 - half]) / half
