"""The record of a run for a proof: which operation read and wrote what, after which events."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rpfunc.runtime.progress import Happened

Location = tuple[Hashable, ...]
"""A place in memory, by its use: ('activation', iteration, layer, microbatch) or ('device sums', worker, side)."""


class Access(NamedTuple):
    """What one operation of a channel did.

    channel        worker and name; the operations of a channel follow each other
    event          that it recorded
    waits          events that it waited for
    reads, writes  places whose values it used, and those whose values it changed or took away
    """

    channel: tuple[int, str]
    event: Happened
    waits: tuple[Happened, ...]
    reads: frozenset[Location]
    writes: frozenset[Location]


class Recorder:
    """Writes down accesses where they are made, in the order in which operations end; if not asked to, nothing."""

    def __init__(self, recording: bool) -> None:
        self.trace: list[Access] = []
        self._recording = recording
        self._own = threading.local()  # each thread does one operation at a time

    @contextmanager
    def operation(self, channel: tuple[int, str], event: Happened, waits: Iterable[Happened]) -> Iterator[None]:
        """Takes the accesses that this thread makes in the block as those of one operation."""
        if not self._recording:
            yield
            return
        reads: set[Location] = set()
        writes: set[Location] = set()
        self._own.accesses = reads, writes
        try:
            yield
        finally:
            del self._own.accesses
        self.trace.append(Access(channel, event, tuple(waits), frozenset(reads), frozenset(writes)))

    def read(self, *location: Hashable) -> None:
        """Notes that the present operation uses the value at a place."""
        if self._recording and hasattr(self._own, "accesses"):
            self._own.accesses[0].add(location)

    def write(self, *location: Hashable) -> None:
        """Notes that the present operation changes the value at a place, or takes it away."""
        if self._recording and hasattr(self._own, "accesses"):
            self._own.accesses[1].add(location)
