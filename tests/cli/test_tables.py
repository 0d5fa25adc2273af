"""Tables in any width: every cell stands whole in one of them."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rpfunc.cli.tables import Column, tables

numbers = st.decimals(-(10**6), 10**6, places=2).map(str)


@given(st.lists(st.tuples(st.text("abcdefgh", min_size=1, max_size=8), numbers, numbers), max_size=6), st.data())
def test_every_number_stands_whole(columns, data):
    others = [Column(header, cells) for header, *cells in columns]
    width = data.draw(st.integers(30, 120))
    console = Console(width=width, file=io.StringIO())
    first = Column("schedule", ["one_f_one_b", "split_dispatch"])
    for table in tables(first, others, width, bold=1):
        console.print(table)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    cells = [cell.strip() for line in lines for cell in line.split("│")]
    assert {number for _, *numbers in columns for number in numbers} <= {*cells}
