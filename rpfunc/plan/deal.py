"""A plan and how its slots are dealt: what the planner by simulated time chooses between, and a quick clock for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from rpfunc.plan.plan import Plan
from rpfunc.schedule.building import even_runs
from rpfunc.schedule.split_dispatch import enough_blocks, split_dispatch
from rpfunc.schedule.task import Schedule
from rpfunc.schedule.workload import Workload


class Deal(NamedTuple):
    """A plan, and into how many cards each of its slots is cut: runs of microbatches, dealt to workers in turn."""

    plan: Plan
    ways: tuple[int, ...]

    @property
    def num_cards(self) -> int:
        """Cards of one iteration."""
        return sum(self.ways)

    def workload(self, microbatches: int, *, num_iterations: int = 1, staleness: int = 0) -> Workload:
        """Returns the workload, with as many gradient blocks as the cards need (the `blocks` of a real run)."""
        written = {ways for ways, (kind, _) in zip(self.ways, self.plan.slots, strict=True) if kind != "F" and ways > 1}
        blocks = enough_blocks(microbatches, written) if written else 1
        return Workload(self.plan.slots, microbatches, blocks, num_iterations, staleness)

    def schedule(self, work: Workload, num_workers: int, start: int = 0) -> Schedule:
        """Returns the schedule; a generator of schedules, as `split_dispatch`."""
        return split_dispatch(work, num_workers, self.ways, start)

    def period(self, num_workers: int) -> int:
        """Returns after how many iterations the deal comes round to the same worker."""
        return num_workers // math.gcd(self.num_cards, num_workers)


def least_time(
    deal: Deal, times: Sequence[float], num_workers: int, microbatches: int, *, joined: bool = False
) -> float:
    """Returns a time that an iteration of the deal does not go below; `times` as in `iteration_ends`, updates left out.

    One iteration: a worker waits until a microbatch has come to its first card, does all its cards, and from its last
    one a microbatch has to go on to the end. Joined ones, on average: cards that lie as far apart as the number that
    divides both cards and workers always go to the same workers. Cost: O(cards), some 0.1 µs each.
    """
    turn = math.gcd(deal.num_cards, num_workers) if joined else min(deal.num_cards, num_workers)
    work, before, after = ([0.0] * turn for _ in range(3))
    card, passed, left = 0, 0.0, sum(times)
    for ways, time in zip(deal.ways, times, strict=True):
        left -= time
        size, larger = divmod(microbatches, ways)
        long, short = time * (size + 1), time * size
        for number in range(ways):
            worker = card % turn
            if card < turn:
                before[worker] = passed
            work[worker] += long if number < larger else short
            after[worker] = left
            card += 1
        passed += time
    return max(work) * turn / num_workers if joined else max(map(sum, zip(before, work, after, strict=True)))


def iteration_ends(
    deal: Deal,
    times: Sequence[float],
    num_workers: int,
    microbatches: int,
    *,
    num_iterations: int = 1,
    staleness: int = 0,
    update: float = 0.0,
) -> list[float]:
    """Returns when the update of each iteration ends, computation alone; `times` are the slots', for a microbatch.

    The same clock as `simulate` of the deal's schedule, some ten times as fast: cards come in an order in which all
    that one waits for has come before. The order of sums in a block delays nothing more, since cards follow it.
    """
    joined = num_iterations > 1
    ended = passes(deal, times, num_workers, microbatches, joined=joined, staleness=staleness, update=update)
    return [each.end for each in islice(ended, num_iterations)]


class Pass(NamedTuple):
    """How things stand after an iteration.

    end    of its update
    free   when each worker is, from the one on whose turn it is
    taken  when each block's sums are, slot by slot; empty where none is overtaken
    """

    end: float
    free: list[float]
    taken: list[float]


def passes(
    deal: Deal,
    times: Sequence[float],
    num_workers: int,
    microbatches: int,
    *,
    joined: bool = True,
    staleness: int = 0,
    update: float = 0.0,
) -> Iterator[Pass]:
    """Yields how things stand after each of iterations without end, on the clock of `iteration_ends`."""
    free = [0.0] * num_workers
    cards_of = {ways: even_runs(microbatches, ways) for ways in set(deal.ways)}
    runs = [cards_of[ways] for ways in deal.ways]
    writes = [kind != "F" for kind, _ in deal.plan.slots]
    # a block's gradients wait for those of the iteration before, where they might overtake them: see `Workload`
    overtakes = joined and (deal.num_cards < num_workers or max(deal.ways) > 1)
    blocks = deal.workload(microbatches).block_starts if overtakes else ()
    lasts = [start - 1 for start in (*blocks[1:], microbatches)]
    taken: dict[int, list[float]] = {}
    ends = [0.0] * (1 + staleness)
    card = 0
    while True:
        before = [ends[-1 - staleness]] * microbatches
        last = ends[-1]
        for slot, (time, cards, written) in enumerate(zip(times, runs, writes, strict=True)):
            after: list[float] = []
            append = after.append
            if slot in taken:
                before = [*before]
                for start, sums in zip(blocks, taken[slot], strict=True):
                    before[start] = max(before[start], sums)
            for run in cards:
                worker = card % num_workers
                card += 1
                clock = free[worker]
                for ready in before[run.start : run.stop]:
                    if ready > clock:
                        clock = ready
                    clock += time
                    append(clock)
                free[worker] = clock
                if written and clock > last:
                    last = clock
            if written and overtakes:
                taken[slot] = [after[place] for place in lasts]
            before = after
        ends.append(last + update)
        turn = card % num_workers
        yield Pass(ends[-1], free[turn:] + free[:turn], [*chain.from_iterable(taken.values())])
