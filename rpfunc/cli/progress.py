"""The progress of a training run on a terminal: a bar there, a line now and then in a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from rpfunc.train.loop import HELD_OUT, Report


@contextmanager
def show_progress(console: Console, start: int, steps: int) -> Iterator[Report]:
    """Yields a function that shows each line of the metrics: step, loss, tokens/s, bubble and time left."""
    if not console.is_terminal:
        yield lambda record: _log(console, record, steps)
        return
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("train", total=steps, completed=start, figures="evaluating")

        def report(record: Mapping[str, Any]) -> None:
            if HELD_OUT in record:
                progress.console.print(_held_out(record))
            else:
                progress.update(bar, completed=record["step"], figures=_figures(record))

        yield report


def _log(console: Console, record: Mapping[str, Any], steps: int) -> None:
    if HELD_OUT in record:
        console.print(_held_out(record))
    elif record["step"] % max(1, steps // 20) == 0:
        console.print(f"step {record['step']}/{steps}: {_figures(record)}")


def _held_out(record: Mapping[str, Any]) -> str:
    return f"step {record['step']}: held-out loss {record[HELD_OUT]:.3f} bits per byte"


def _figures(record: Mapping[str, Any]) -> str:
    skipped = "  skipped" if record["skipped"] else ""
    return (
        f"{record['bits_per_byte']:.3f} bits per byte  {record['tokens_per_s']:,.0f} tokens/s  "
        f"bubble {record['bubble']:.0%}{skipped}"
    )
