"""Drawing a timeline in a terminal."""

from __future__ import annotations

import textwrap
from itertools import groupby
from typing import TYPE_CHECKING

from rpfunc.errors import OptionsError
from rpfunc.schedule.timeline import HOST, KIND_NAMES, Event, Timeline, every_second_stage

if TYPE_CHECKING:
    from rich.text import Text

LEAST_WIDTH = 40
STYLES = {"F": "blue", "X": "red", "B": "yellow", "I": "cyan", "W": "magenta", "U": "green", ".": "dim"}
NAMES = {**KIND_NAMES, "U": "update", ".": "idle"}


def gantt(timeline: Timeline, width: int = 80) -> Text:
    r"""Returns a chart with one line a worker, `width` columns wide; `print` shows it plainly, rich in colour.

    A letter is the kind of task that fills most of a column's time; its case changes where the worker goes on to
    another stage. A dot is a worker that is idle for most of it. Updates, where there are any, have a line of the host.
    Time begins with the first event, transfers included, and is in the timeline's unit; what is idle is a share of the
    workers' own time, `Timeline.bubble`. Raises OptionsError for fewer than 40 columns.

    >>> from rpfunc.plan.costs import StageCost
    >>> from rpfunc.schedule import Schedule, simulate
    >>> costs = {("F", 0): StageCost(1), ("X", 1): StageCost(2), ("B", 0): StageCost(3)}
    >>> print(gantt(simulate(Schedule.parse("0F0 0F1 0B0 0B1\n1X0 1X1"), costs), width=45))
    worker 0 FFFFFFFF....BBBBBBBBBBBBBBBBBBBBBBBB
    worker 1 ....XXXXXXXXXXXXXXXX................
             0            idle 33.3%            9
    F forward, X fused, B backward, . idle
    """
    from rich.text import Text

    if width < LEAST_WIDTH:
        raise OptionsError(f"gantt: width is {width}, it must be at least {LEAST_WIDTH}")
    names = {worker: f"worker {worker} " for worker in range(timeline.num_workers)}
    names |= {HOST: "host "} if any(event.worker == HOST for event in timeline.shown) else {}
    margin = max(map(len, names.values()), default=0)
    rows = _rows(timeline, list(names), width - margin)
    chart = Text()
    for name, row in zip(names.values(), rows, strict=True):
        chart.append(name.ljust(margin))
        for letter, same in groupby(row):
            chart.append("".join(same), STYLES[letter.upper()])
        chart.append("\n")
    first, last = "0", f"{float(timeline.makespan_s):.4g}"
    idle = f"idle {float(timeline.bubble):.1%}".center(width - margin - len(first) - len(last))
    chart.append(f"{'':{margin}}{first}{idle}{last}\n")
    chart.append(textwrap.fill(_legend({letter for row in rows for letter in row}), width))
    return chart


def _legend(shown: set[str]) -> str:
    pairs = {name: sorted({letter, letter.lower()} & shown) for letter, name in NAMES.items()}
    legend = ", ".join(f"{'/'.join(letters)} {name}" for name, letters in pairs.items() if letters)
    return f"{legend}; lower case: every second stage" if any(map(str.islower, shown)) else legend


def _rows(timeline: Timeline, lines: list[int], columns: int) -> list[str]:
    """Returns for each line, a worker's or the host's, the letters of its columns."""
    shares: dict[int, list[dict[str, float]]] = {line: [{} for _ in range(columns)] for line in lines}
    start = float(min((event.start_s for event in timeline.events), default=0.0))
    end = start + float(timeline.makespan_s)
    lower = every_second_stage(timeline)
    for event in timeline.shown:
        if event.channel not in ("compute", "update") or start == end:
            continue
        letter = _letter(event, event.task in lower)
        first, last = ((float(time) - start) / (end - start) * columns for time in (event.start_s, event.end_s))
        for column in range(int(first), min(int(last) + 1, columns)):
            own = shares[event.worker][column]
            own[letter] = own.get(letter, 0.0) + min(last, column + 1) - max(first, column)
    return ["".join(map(_most, row)) for row in shares.values()]


def _letter(event: Event, is_lower: bool) -> str:
    if event.channel == "update":
        return "U"
    return event.task.kind.lower() if is_lower else event.task.kind


def _most(shares: dict[str, float]) -> str:
    return max(shares, key=lambda letter: shares[letter]) if sum(shares.values()) >= 0.5 else "."
