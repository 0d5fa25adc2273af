"""Units of time by size, for what people read."""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """A unit of time: its name, and how many of it are a second."""

    name: str
    per_second: float


UNITS = (Unit("s", 1.0), Unit("ms", 1e3), Unit("µs", 1e6))


def unit_of(seconds: float) -> Unit:
    """Returns the largest unit of which a time is one or more; microseconds for any shorter one.

    >>> [unit_of(seconds).name for seconds in (160.0, 0.5, 0.0005, 0.0)]
    ['s', 'ms', 'µs', 'µs']
    """
    return next((unit for unit in UNITS if seconds * unit.per_second >= 1), UNITS[-1])
