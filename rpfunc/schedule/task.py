"""The notation of schedules: tasks, and which worker runs which in what order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from rpfunc.errors import ScheduleError

KINDS = "FBIWX"
"""F forward, B backward, I input gradient, W weight gradient, X fused forward and backward at the turn."""


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
        match = re.fullmatch(rf"(\d+)([{KINDS}])(\d+)", text.strip())
        if match is None:
            raise ScheduleError(
                f"task {text!r}: needs stage, kind (one of {', '.join(KINDS)}) and microbatch, as in '2F0'"
            )
        return cls(int(match[1]), match[2], int(match[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    r"""For each worker the tasks that it runs, in order. A stage may stand on any number of workers.

    >>> print(Schedule.parse("0F0 0F1 0B0 0B1\n1X0 1X1"))
    0F0 0F1 0B0 0B1
    1X0 1X1
    """

    workers: tuple[tuple[Task, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Returns the schedule with one line a worker, tasks apart by spaces. Raises ScheduleError."""
        return cls(tuple(tuple(Task.parse(word) for word in line.split()) for line in text.split("\n")))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, tasks)) for tasks in self.workers)

    @property
    def tasks(self) -> list[Task]:
        """All tasks, worker by worker."""
        return [task for tasks in self.workers for task in tasks]
