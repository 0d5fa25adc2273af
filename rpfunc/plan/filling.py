"""Layers in a row, filled into slots that take no longer than a bound, and the smallest bound for so many slots."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

ROUNDING = 1e-9
"""Relative difference below which two times are the same: sums of floating-point times differ in their last bits."""


class Line(NamedTuple):
    """The layers as slots of one kind.

    sums   of the times of the layers before each
    first  where the longest slot starts that ends before each and is allowed (by memory)
    """

    sums: Sequence[float]
    first: Sequence[int]

    def fill(self, stop: int, bound: float) -> Filled:
        """Returns the fewest slots that take the layers before `stop` in no more time than `bound`, last first."""
        sums, first = self
        bound *= 1 + ROUNDING
        cuts = [stop]
        while stop > 0:  # as `start`, which would take half the time of a plan to call
            start = bisect_left(sums, sums[stop] - bound, first[stop], stop)
            stop = start if start < stop else stop - 1
            cuts.append(stop)
        return Filled(self, cuts)

    def start(self, stop: int, bound: float) -> int:
        """Returns where the longest slot before `stop` starts; it has one layer whatever that takes."""
        start = bisect_left(self.sums, self.sums[stop] - bound * (1 + ROUNDING), self.first[stop], stop)
        return start if start < stop else stop - 1


class Filled(NamedTuple):
    """Slots of a line, by the layers at which they start and stop, last first."""

    line: Line
    cuts: Sequence[int]

    @property
    def num_slots(self) -> int:
        """How many; none for a single cut."""
        return len(self.cuts) - 1

    @property
    def slowest(self) -> float:
        """The time of the slowest slot; 0 if there is none."""
        sums = self.line.sums
        return max((sums[stop] - sums[start] for stop, start in pairwise(self.cuts)), default=0)

    @property
    def next_time(self) -> float:
        """The least time with which a slot could take one layer more; infinite if none may."""
        sums, first = self.line
        return min(
            (sums[stop] - sums[start - 1] for stop, start in pairwise(self.cuts) if start > first[stop]),
            default=math.inf,
        )


def num_slots(filled: Sequence[Filled]) -> int:
    """Returns how many slots there are in all."""
    return sum(len(cuts) - 1 for _, cuts in filled)


def smallest_bound(fill: Callable[[float], Sequence[Filled]], slots: int, low: float, high: float) -> float:
    """Returns the smallest bound that `fill` needs at most `slots` slots for, up to a few times ROUNDING.

    `high` is such a bound, and `low` no larger than the result. Halves the interval, then goes on to where something
    changes: down to the slowest slot of those filled, or up to the least with which one could take one layer more.
    """
    while high - low > 4 * ROUNDING * high:
        filled = fill((low + high) / 2)
        if num_slots(filled) <= slots:
            high = min(high, max(line.slowest for line in filled))
        else:
            low = min(line.next_time for line in filled)
    return high
