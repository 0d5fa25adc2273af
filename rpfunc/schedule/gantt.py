"""Drawing a timeline in a terminal."""

from __future__ import annotations

import textwrap
from itertools import groupby
from typing import TYPE_CHECKING

from rpfunc.errors import OptionsError
from rpfunc.schedule.timeline import KIND_NAMES, Timeline, every_second_stage

if TYPE_CHECKING:
    from rich.text import Text

LEAST_WIDTH = 40
STYLES = {"F": "blue", "X": "red", "B": "yellow", "I": "cyan", "W": "magenta", ".": "dim"}


def gantt(timeline: Timeline, width: int = 80) -> Text:
    r"""Returns a chart with one line a worker, `width` columns wide; `print` shows it plainly, rich in colour.

    A letter is the kind of task that fills most of a column's time; its case changes where the worker goes on to
    another stage. A dot is a worker that is idle for most of it. Time begins with the first task or transfer, in the
    timeline's unit. Raises OptionsError for fewer than 40 columns.

    >>> from rpfunc.plan.costs import StageCost
    >>> from rpfunc.schedule import Schedule, simulate
    >>> costs = {("F", 0): StageCost(1), ("X", 1): StageCost(2), ("B", 0): StageCost(3)}
    >>> print(gantt(simulate(Schedule.parse("0F0 0F1 0B0 0B1\n1X0 1X1"), costs), width=45))
    worker 0 FFFFFFFF....BBBBBBBBBBBBBBBBBBBBBBBB
    worker 1 ....XXXXXXXXXXXXXXXX................
             0            idle 33.3%            9
    F forward, X fused, B backward
    """
    from rich.text import Text

    if width < LEAST_WIDTH:
        raise OptionsError(f"gantt: width is {width}, it must be at least {LEAST_WIDTH}")
    names = [f"worker {worker} " for worker in range(timeline.num_workers)]
    margin = max(map(len, names), default=0)
    rows = _rows(timeline, width - margin)
    chart = Text()
    for name, row in zip(names, rows, strict=True):
        chart.append(name.ljust(margin))
        for letter, same in groupby(row):
            chart.append("".join(same), STYLES[letter.upper()])
        chart.append("\n")
    start, end = map(float, timeline.window_s)
    first, last = "0", f"{end - start:.4g}"
    idle = f"idle {float(timeline.bubble):.1%}".center(width - margin - len(first) - len(last))
    chart.append(f"{'':{margin}}{first}{idle}{last}\n")
    shown = {letter.upper() for row in rows for letter in row}
    legend = ", ".join(f"{kind} {name}" for kind, name in KIND_NAMES.items() if kind in shown)
    chart.append(textwrap.fill(legend, width))
    return chart


def _rows(timeline: Timeline, columns: int) -> list[str]:
    """Returns for each worker the letters of its columns."""
    shares: list[list[dict[str, float]]] = [[{} for _ in range(columns)] for _ in range(timeline.num_workers)]
    start, end = map(float, timeline.window_s)
    lower = every_second_stage(timeline)
    for event in timeline.events:
        if event.channel != "compute" or start == end:
            continue
        letter = event.task.kind.lower() if event.task in lower else event.task.kind
        first, last = ((float(time) - start) / (end - start) * columns for time in (event.start_s, event.end_s))
        for column in range(int(first), min(int(last) + 1, columns)):
            own = shares[event.worker][column]
            own[letter] = own.get(letter, 0.0) + min(last, column + 1) - max(first, column)
    return ["".join(map(_letter, row)) for row in shares]


def _letter(shares: dict[str, float]) -> str:
    return max(shares, key=lambda letter: shares[letter]) if sum(shares.values()) >= 0.5 else "."
