"""A plan and how its slots are dealt: what the planner by simulated time chooses between, and a quick clock for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
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
    free = [0.0] * num_workers
    runs = [even_runs(microbatches, ways) for ways in deal.ways]
    ends: list[float] = []
    writes = [kind != "F" for kind, _ in deal.plan.slots]
    # a block's gradients wait for those of the iteration before, where they might overtake them: see `Workload`
    overtakes = num_iterations > 1 and (deal.num_cards < num_workers or max(deal.ways) > 1)
    blocks = deal.workload(microbatches).block_starts if overtakes else ()
    taken: dict[int, list[float]] = {}
    card = 0
    for iteration in range(num_iterations):
        awaited = iteration - 1 - staleness
        before = [ends[awaited] if awaited >= 0 else 0.0] * microbatches
        last = ends[-1] if ends else 0.0
        for slot, (time, cards, written) in enumerate(zip(times, runs, writes, strict=True)):
            after: list[float] = []
            if slot in taken:
                before = [*before]
                for start, stop in pairwise([*blocks, microbatches]):
                    before[start] = max(before[start], taken[slot][stop - 1])
            for run in cards:
                worker = card % num_workers
                card += 1
                clock = free[worker]
                for ready in before[run.start : run.stop]:
                    clock = (ready if ready > clock else clock) + time
                    after.append(clock)
                free[worker] = clock
                if written and clock > last:
                    last = clock
            if written and overtakes:
                taken[slot] = after
            before = after
        ends.append(last + update)
    return ends
