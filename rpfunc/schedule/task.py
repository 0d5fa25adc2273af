"""The notation of schedules: tasks, and which worker runs which in what order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rpfunc.checks import shown
from rpfunc.errors import ScheduleError

KINDS = "FBIWX"
"""F forward, B backward, I input gradient, W weight gradient, X fused forward and backward at the turn."""

MOST_DIGITS = 18
"""Of a stage or microbatch: what 64 bits hold."""

MOST_SHOWN = 8
"""Problems of a kind that an error lists before it counts the rest."""


class Task(NamedTuple):
    """One stage on one microbatch; printed `2F0`: stage 2, forward, microbatch 0."""

    stage: int
    kind: str
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> Task:
        """Returns the task that prints as `text`. Raises ScheduleError for anything else.

        >>> Task.parse("2F0")
        Task(stage=2, kind='F', microbatch=0)
        """
        match = re.fullmatch(rf"([0-9]{{1,{MOST_DIGITS}}})([{KINDS}])([0-9]{{1,{MOST_DIGITS}}})", text.strip())
        if match is None:
            raise ScheduleError(
                f"task {text!r:.60}: needs stage, kind (one of {', '.join(KINDS)}) and microbatch, as in '2F0'; "
                f"numbers have at most {MOST_DIGITS} digits"
            )
        return cls(int(match[1]), match[2], int(match[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    r"""For each worker the tasks that it runs, in order. A stage may stand on any number of workers, a worker idle.

    Raises ScheduleError listing every entry that is no task.

    >>> print(Schedule.parse("0F0 0F1 0B0 0B1\n1X0 1X1"))
    0F0 0F1 0B0 0B1
    1X0 1X1
    """

    workers: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        problems = _problems(self.workers)
        if problems:
            raise refusal(problems)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Returns the schedule with one line a worker, tasks apart by spaces; an empty line is an idle worker.

        The last line may end, as lines of a file do: `print` ends it where the last worker is idle.
        Raises ScheduleError naming line and place of every word that is no task; both count from 1.
        """
        workers, problems = [], []
        for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
            tasks = []
            for place, word in enumerate(line.split(), start=1):
                try:
                    tasks.append(Task.parse(word))
                except ScheduleError as error:
                    problems.append(f"line {number}, word {place}: {error}")
            workers.append(tuple(tasks))
        if problems:
            raise refusal(problems)
        return cls(tuple(workers))

    def __str__(self) -> str:
        lines = "\n".join(" ".join(map(str, tasks)) for tasks in self.workers)
        return lines if self.workers[-1] else lines + "\n"

    @property
    def tasks(self) -> list[Task]:
        """All tasks, worker by worker."""
        return [task for tasks in self.workers for task in tasks]


def refusal(problems: Sequence[str]) -> ScheduleError:
    """Returns the error that lists a schedule's problems, the first 8 of them."""
    return listing([(problems[:MOST_SHOWN], len(problems))])


def listing(kinds: Sequence[tuple[Sequence[str], int]]) -> ScheduleError:
    """Returns the error that lists problems of several kinds: of each those to show, and how many there are."""
    lines: list[str] = []
    for some, total in kinds:
        lines += [*some, f"and {total - len(some)} more"] if total > len(some) else some
    if len(lines) == 1:
        return ScheduleError(f"schedule: {lines[0]}")
    bullets = "".join(f"\n  - {line}" for line in lines)
    return ScheduleError(f"schedule: {sum(total for _, total in kinds)} problems{bullets}")


def _problems(workers: Any) -> list[str]:
    """Returns what keeps `workers` from being, for each worker, a tuple of tasks."""
    if not isinstance(workers, tuple):
        return [f"workers is of type {type(workers).__name__}, needs a tuple with a tuple of tasks for each worker"]
    if not workers:
        return ["has no worker, needs at least one"]
    problems = []
    for worker, tasks in enumerate(workers):
        if type(tasks) is not tuple:
            problems.append(f"worker {worker} is of type {type(tasks).__name__}, needs a tuple of tasks")
        else:
            problems += [
                f"worker {worker}, place {place}: {shown(task)} is no task, needs one such as Task(2, 'F', 0), "
                f"numbers below 10**{MOST_DIGITS}"
                for place, task in enumerate(tasks)
                if not _is_task(task)
            ]
    return problems


def _is_task(entry: Any) -> bool:
    if not isinstance(entry, Task):
        return False
    stage, kind, m = entry
    within = type(stage) is int and type(m) is int and 0 <= stage < 10**MOST_DIGITS and 0 <= m < 10**MOST_DIGITS
    return within and kind in tuple(KINDS)
