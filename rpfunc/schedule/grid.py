"""Drawing a schedule as text, with arrows at the tasks that one should look at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

from rpfunc.schedule.task import MOST_SHOWN, Schedule

Place = tuple[int, int]
"""(worker, place in its list), both from 0."""

MOST_WORKERS = 12
MOST_TASKS = 16
NEAR = 2


T = TypeVar("T")


class Fault(NamedTuple):
    """What is wrong, in words, and where one should look."""

    text: str
    places: Collection[Place]


class Faults(NamedTuple):
    """The first faults of a kind, and how many there are in all."""

    shown: Sequence[Fault]
    total: int

    @classmethod
    def of(cls, found: Sequence[T], fault: Callable[[T], Fault]) -> Faults:
        """Returns the faults of all that was found; words are made only for what is shown."""
        return cls([fault(one) for one in found[:MOST_SHOWN]], len(found))


def grid(schedule: Schedule, marked: Collection[Place]) -> str:
    r"""Returns the schedule, one line a worker, with `>` and `<` around the marked tasks.

    A schedule of more than 12 workers or 16 tasks a worker is cut: to the first 12 workers that have a marked task,
    and on each to the tasks at most 2 places from one.

    >>> print(grid(Schedule.parse("0F0 0F1\n1X0 1X1"), [(1, 0)]))
    worker 0:  0F0   0F1
    worker 1: >1X0<  1X1
    """
    workers = list(range(len(schedule.workers)))
    whole = len(workers) <= MOST_WORKERS and all(len(tasks) <= MOST_TASKS for tasks in schedule.workers)
    if not whole:
        workers = sorted({worker for worker, _ in marked})[:MOST_WORKERS]
    cells = {worker: _cells(schedule, worker, set(marked), whole) for worker in workers}
    width = max((len(cell) for line in cells.values() for cell in line), default=0)
    label = len(str(max(workers, default=0)))
    return "\n".join(
        f"worker {worker:>{label}}: {' '.join(cell.ljust(width) for cell in line)}".rstrip()
        for worker, line in cells.items()
    )


def _cells(schedule: Schedule, worker: int, marked: set[Place], whole: bool) -> list[str]:
    tasks = schedule.workers[worker]
    shown: Sequence[int] = range(len(tasks))
    if not whole:
        own = sorted(place for other, place in marked if other == worker)
        near = {place + step for place in own for step in range(-NEAR, NEAR + 1)}
        shown = [place for place in sorted(near) if 0 <= place < len(tasks)][:MOST_TASKS]
    cells, before = [], -1
    for place in shown:
        if place > before + 1:
            cells.append(" ...")
        cells.append(f">{tasks[place]}<" if (worker, place) in marked else f" {tasks[place]} ")
        before = place
    return cells if before == len(tasks) - 1 else [*cells, " ..."]
