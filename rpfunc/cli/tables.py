"""Tables that never cut a number: columns that a terminal has no room for go into further tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table

BETWEEN = 3
"""What a column takes beside its text: two blanks and a line; and there is one more line."""


class Column(NamedTuple):
    """A column: its header and the text of its cells."""

    header: str
    cells: Sequence[str]

    @property
    def width(self) -> int:
        """How many letters it needs."""
        return max(map(len, (self.header, *self.cells)))


def tables(first: Column, others: Sequence[Column], width: int, bold: int | None = None) -> Iterator[Table]:
    """Yields tables at most `width` wide, each with the first column and as many of the others as fit.

    Numbers stand on the right. Only the first column is folded where it leaves no room for one other.
    bold  the row to stress
    """
    widest = max((column.width for column in others), default=0)
    room = width - 1 - min(first.width, max(1, width - 1 - 2 * BETWEEN - widest)) - BETWEEN
    groups: list[list[Column]] = [[]]
    left = room
    for column in others:
        if groups[-1] and column.width + BETWEEN > left:
            groups.append([])
            left = room
        groups[-1].append(column)
        left -= column.width + BETWEEN
    for group in groups:
        table = Table(box=box.ROUNDED)
        table.add_column(first.header, overflow="fold")
        for column in group:
            table.add_column(column.header, justify="right", no_wrap=True, min_width=column.width)
        for row, cells in enumerate(zip(first.cells, *(column.cells for column in group), strict=True)):
            table.add_row(*cells, style="bold" if row == bold else None)
        yield table
