"""Schedules as the CSV files of `torch.distributed.pipelining`: a row a worker, a cell an action."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from rpfunc.errors import ScheduleError
from rpfunc.schedule.task import Schedule, Task, refusal

COMPUTE = re.compile(r"[0-9]{1,18}[FIWB][0-9]{1,18}")
OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
IMPLIED = re.compile(r"[0-9]+((SEND|RECV)_[FB][0-9]+|UNSHARD|RESHARD|REDUCE_GRAD)")
"""Actions that follow from the tasks and their order."""


def load_csv(source: str | Path) -> Schedule:
    r"""Returns the schedule in a CSV of torch.distributed.pipelining, given as text or as the path of a file.

    Both its formats are read: computation alone, where an empty cell is a bubble, and with communication. Sends,
    receives, UNSHARD, RESHARD and REDUCE_GRAD are left out, since they follow from the tasks. Two tasks that torch
    overlaps, `(0F1;1B0)OVERLAP_F_B`, become two tasks in that order. A row without tasks is a worker without work.
    Raises ScheduleError for a file that cannot be read, and naming row and cell, from 1, of all that is no action.
    Source: torch 2.13, torch/distributed/pipelining/schedules.py.

    >>> print(load_csv("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1,1REDUCE_GRAD\n"))
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    text = _read(source) if isinstance(source, Path) else source
    if not {*",\n"} & {*text} and (text.endswith(".csv") or {*"/\\"} & {*text}):
        raise ScheduleError(f"torch CSV: {text!r:.60} looks like a file; for its rows give a pathlib.Path")
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"torch CSV: {error}") from None
    problems = []
    workers = []
    for number, row in enumerate(rows, start=1):
        tasks: list[Task] = []
        for place, cell in enumerate(row, start=1):
            words = _words(cell.strip())
            if words is None:
                problems.append(
                    f"row {number}, cell {place}: {cell!r:.60} is no action of torch.distributed.pipelining, "
                    "needs one such as 2F0 or 3SEND_F1"
                )
            else:
                tasks += map(Task.parse, words)
        workers.append(tuple(tasks))
    if problems:
        raise refusal(problems)
    return Schedule(tuple(workers))


def dump_csv(schedule: Schedule) -> str:
    r"""Returns a schedule as a CSV of torch.distributed.pipelining, computation alone, without bubbles.

    torch needs a whole pipeline, each stage on one worker. `load_csv(dump_csv(schedule))` is the schedule. Raises
    ScheduleError for fused tasks, which torch does not know.

    >>> dump_csv(Schedule.parse("0F0 0B0\n1F0 1B0"))
    '0F0,0B0\n1F0,1B0\n'
    """
    fused = sorted({task.stage for task in schedule.tasks if task.kind == "X"})
    if fused:
        raise ScheduleError(
            f"torch CSV: has fused tasks (X) of stage {', '.join(map(str, fused))}, which torch.distributed.pipelining "
            "does not know; a plan without a fused stage, as Plan.symmetric has it, would do"
        )
    return "".join(",".join(map(str, tasks)) + "\n" for tasks in schedule.workers)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"torch CSV: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScheduleError(f"torch CSV: {path} is no UTF-8 text: {error}") from error
    except ValueError as error:
        raise ScheduleError(f"torch CSV: {str(path)!r:.60} is no name of a file: {error}") from error


def _words(cell: str) -> list[str] | None:
    """Returns the tasks in a cell, as text; None if it is no action."""
    if not cell or IMPLIED.fullmatch(cell):
        return []
    overlapped = OVERLAPPED.fullmatch(cell)
    words = [word.strip() for word in overlapped[1].split(";")] if overlapped else [cell]
    return words if all(COMPUTE.fullmatch(word) for word in words) else None
