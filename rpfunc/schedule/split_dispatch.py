"""Split dispatch: round-robin in which a heavy slot is dealt to several workers, each with some of its microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rpfunc.checks import is_whole, shown
from rpfunc.errors import ScheduleError
from rpfunc.schedule.building import check_size, even_runs, run_of
from rpfunc.schedule.round_robin import deal
from rpfunc.schedule.task import Schedule
from rpfunc.schedule.workload import Slot, Workload


def split_dispatch(
    work: Workload, num_workers: int, ways: Sequence[int] | Mapping[Slot, int], start: int = 0
) -> Schedule:
    """Returns the round-robin schedule in which slot i is cut into ways[i] cards, dealt to the next workers in turn.

    `ways` has a number for each slot, or is a mapping from (kind, stage) to those above 1. Cards are runs of
    microbatches, sizes differing by at most one, larger first. A slot that writes gradients is cut only where a
    gradient block starts, so that sums stay in order: `num_blocks` equal to its ways will do. Each card has its
    parameters uploaded and its gradients downloaded. After this schedule the cursor stands at
    start + sum of ways * iterations.
    Source: own; round-robin dispatch from RoundPipe (arXiv 2604.27085). Raises ScheduleError listing what cannot be.

    >>> work = Workload([("F", 0), ("X", 1), ("B", 0)], num_microbatches=4, num_blocks=2)
    >>> print(split_dispatch(work, num_workers=2, ways={("X", 1): 2}))
    0F0 0F1 0F2 0F3 1X2 1X3
    1X0 1X1 0B0 0B1 0B2 0B3
    """
    check_size("split_dispatch", work, num_workers)
    cards_of = _ways_of_slots(work, ways)
    return deal(
        (
            run_of(work, slot, [iteration * work.num_microbatches + m for m in run])
            for iteration in range(work.num_iterations)
            for slot, cards in cards_of.items()
            for run in even_runs(work.num_microbatches, cards)
        ),
        num_workers,
        start,
    )


def _ways_of_slots(work: Workload, ways: Sequence[int] | Mapping[Slot, int]) -> dict[Slot, int]:
    """Returns the cards of each slot, in the slots' order. Raises ScheduleError listing all that cannot be."""
    problems = []
    if not isinstance(ways, Mapping | Sequence):
        raise ScheduleError(
            f"split_dispatch: ways is {shown(ways)}, it must be numbers, or a mapping from slots to them"
        )
    if isinstance(ways, Mapping):
        problems += [
            f"ways has {shown(slot)}, which is no slot, they are such as {work.slots[0]}"
            for slot in sorted(ways.keys() - set(work.slots), key=shown)
        ]
        cards = {slot: ways.get(slot, 1) for slot in work.slots}
    else:
        if len(ways) != len(work.slots):
            problems.append(f"ways has {len(ways)} numbers, there are {len(work.slots)} slots")
        cards = dict(zip(work.slots, ways, strict=False))
    problems += [
        f"slot {stage}{kind} in {shown(number)} ways, it must be 1 to {work.num_microbatches}, the number of "
        "microbatches"
        for (kind, stage), number in cards.items()
        if not (is_whole(number) and 1 <= number <= work.num_microbatches)
    ]
    if not problems:
        summed = {slot: number for slot, number in cards.items() if slot[0] in "XB" and number > 1}
        cut = [
            f"{stage}{kind} in {number} ways"
            for (kind, stage), number in summed.items()
            if not _starts(work.num_microbatches, number) <= set(work.block_starts)
        ]
        if cut:
            problems.append(
                f"slots {', '.join(cut)} would be cut inside a gradient block, num_blocks is {work.num_blocks}; "
                f"num_blocks={enough_blocks(work.num_microbatches, set(summed.values()))} would do"
            )
    if problems:
        raise ScheduleError.listing("split_dispatch", problems)
    return cards


def enough_blocks(num_microbatches: int, ways: set[int]) -> int:
    """Returns the least number of gradient blocks, one of which starts wherever a slot in any of these ways is cut."""
    starts = set[int]().union(*(_starts(num_microbatches, number) for number in ways))
    fitting = range(max(ways), num_microbatches + 1)
    return next(blocks for blocks in fitting if starts <= _starts(num_microbatches, blocks))


def _starts(num_microbatches: int, num_runs: int) -> set[int]:
    return {run.start for run in even_runs(num_microbatches, num_runs)}
