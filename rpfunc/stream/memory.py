"""What earlier rows leave for later ones, and how cotangents come back to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.model import Flat, accumulator_dtype
from rpfunc.stream.flat import floating, write


class Memory(Protocol):
    """What the chunks of one layer leave for each other: filled from first to last, differentiated backwards."""

    def past(self, start: int) -> Any:
        """Returns what the chunk at row `start` reads of earlier rows; None for none."""

    def keep(self, left: Any, start: int, stop: int, num_rows: int) -> None:
        """Keeps what the chunk of rows start to stop left."""


class StateMemory:
    """A state handed from chunk to chunk: one value at each boundary, found by its row."""

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}
        self._cotangents: dict[int, Flat] = {}

    def past(self, start: int) -> Any:
        """Returns the state at row `start`."""
        return self._states.get(start)

    def keep(self, left: Any, start: int, stop: int, num_rows: int) -> None:
        """Keeps the state at row `stop`."""
        del start, num_rows
        self._states[stop] = left

    def cotangent(self, stop: int) -> Flat | None:
        """Returns the cotangent of the state at row `stop`; None for zero."""
        return self._cotangents.pop(stop, None)

    def receive(self, cotangent: Flat, start: int) -> None:
        """Takes the cotangent of the state at row `start`, which no one needs any more."""
        self._cotangents[start] = cotangent
        self._states.pop(start, None)


class RowMemory:
    """Something of every row, such as keys and values, in one buffer; a chunk reads `window` - 1 rows back, or all.

    Cotangents are summed in float32 or wider.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._rows: Any = None
        self._filled = 0
        self._cotangents: Flat | None = None

    def past(self, start: int, stop: int | None = None) -> Any:
        """Returns what rows before `start`, and with `stop` the chunk's own up to it, show to the chunk (views).

        None where there are no such rows.
        """
        stop = start if stop is None else stop
        first = self._first(start)
        return None if stop == 0 else tree.map(lambda leaf: leaf[:, first:stop], self._rows)

    def holds(self, stop: int) -> bool:
        """Returns whether all rows before `stop` have been kept."""
        return self._filled >= stop

    def keep(self, left: Any, start: int, stop: int, num_rows: int) -> None:
        """Keeps what rows start to stop left."""
        self._rows = write(self._rows, left, start, stop, num_rows)
        self._filled = max(self._filled, stop)

    def cotangent(self, start: int, stop: int) -> Flat | None:
        """Returns the cotangent of what rows start to stop left, in its own dtype, once all later rows have been
        received; None for zero.
        """
        if self._cotangents is None:
            return None
        kinds = floating(self._rows)[0]
        return tuple(place[:, start:stop].to(leaf.dtype) for place, leaf in zip(self._cotangents, kinds, strict=True))

    def receive(self, cotangent: Sequence[Tensor | None], start: int) -> None:
        """Adds the cotangents of what `past(start, ...)` has shown; None for leaves that have none, or no more."""
        for index, part in enumerate(cotangent):
            if part is not None:
                self.receive_rows(index, slice(0, part.shape[1]), part, start)

    def receive_rows(self, index: int, places: slice, part: Tensor, start: int) -> None:
        """Adds the cotangent of the rows at `places` of the leaf at `index` of what `past(start, ...)` has shown."""
        if self._cotangents is None:
            leaves = floating(self._rows)[0]
            self._cotangents = tuple(torch.zeros_like(leaf, dtype=accumulator_dtype(leaf.dtype)) for leaf in leaves)
        first = self._first(start)
        self._cotangents[index][:, first + places.start : first + places.stop].add_(part)

    def _first(self, start: int) -> int:
        return 0 if self._window is None else max(0, start - self._window + 1)
