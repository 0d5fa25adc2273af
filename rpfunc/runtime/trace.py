"""The record of a run for a proof: which operation read and wrote what, after which events."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from rpfunc.runtime.progress import Happened

Location = tuple[Hashable, ...]
"""A place in memory, by what it is for: ('activation', iteration, layer, microbatch), ('device sums', worker, side) ..."""


class Access(NamedTuple):
    """What one operation of a channel did, in the order in which each channel's have ended.

    channel  worker and name; the operations of a channel follow each other
    event    that it recorded
    waits    events that it waited for
    reads, writes  places whose values it used, and those whose values it changed or took away
    """

    channel: tuple[int, str]
    event: Happened
    waits: tuple[Happened, ...]
    reads: frozenset[Location]
    writes: frozenset[Location]
