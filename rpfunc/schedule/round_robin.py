"""The round-robin schedule: slots dealt to workers like cards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rpfunc.checks import count_problems, is_whole, shown
from rpfunc.errors import ScheduleError
from rpfunc.schedule.building import check_size, even_runs, num_rounds, run_of
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Workload


def round_robin(work: Workload, num_workers: int, start: int = 0, round_size: int | None = None) -> Schedule:
    """Returns the schedule in which card c goes to worker (start + c) mod num_workers; a card is a slot of one round.

    The plan's forward, fused and backward stages form one sequence of slots. An iteration's microbatches go through it
    in rounds of at least `round_size`, as even as can be, larger first; None: in one round. Rounds and iterations
    follow each other without a gap: the cursor is never reset. After this schedule it stands at
    start + slots * rounds * iterations. Rounds bound what the host keeps, at the price of more parameter uploads.
    Source: RoundPipe (arXiv 2604.27085), round-robin dispatch. Raises ScheduleError for no worker, and for rounds of
    fewer microbatches than workers, in which workers would wait.

    >>> print(round_robin(Workload([("F", 0), ("X", 1), ("B", 1), ("B", 0)], num_microbatches=2), num_workers=2))
    0F0 0F1 1B0 1B1
    1X0 1X1 0B0 0B1
    """
    check_size("round_robin", work, num_workers)
    check_rounds("round_robin", num_workers, round_size)
    rounds = 1 if round_size is None else num_rounds(work.num_microbatches, round_size)
    cards = (
        run_of(work, slot, [iteration * work.num_microbatches + m for m in run])
        for iteration in range(work.num_iterations)
        for run in even_runs(work.num_microbatches, rounds)
        for slot in work.slots
    )
    return deal(cards, num_workers, start)


def check_rounds(subject: str, num_workers: int, round_size: int | None) -> None:
    """Raises ScheduleError for rounds that are no number, or of fewer microbatches than workers."""
    problems = [] if round_size is None else count_problems({"round_size": round_size})
    if not problems and round_size is not None and round_size < num_workers:
        problems.append(
            f"round_size is {round_size}, fewer than the {num_workers} workers, which would wait for each other; "
            f"round_size={num_workers} would do"
        )
    if problems:
        raise ScheduleError.listing(subject, problems)


def deal(cards: Iterable[Sequence[Task]], num_workers: int, start: int) -> Schedule:
    """Returns the schedule in which the cards, runs of tasks, go to the workers in turn, from `start` on."""
    if not is_whole(start):
        raise ScheduleError(f"start is {shown(start)}, it must be a whole number")
    workers: list[list[Task]] = [[] for _ in range(num_workers)]
    for place, card in enumerate(cards, start):
        workers[place % num_workers].extend(card)
    return Schedule(tuple(map(tuple, workers)))
