"""A proof of one run: any two accesses to one place, one of which writes, are ordered by events, not by luck."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from rpfunc.runtime.trace import Access, Location

Clock = dict[tuple[int, str], int]


class _Use(NamedTuple):
    access: Access
    tick: int


def races(trace: Iterable[Access]) -> list[str]:
    """Returns, in words, every race of a recorded run: accesses to one place whose order nothing guarantees.

    Also every value that is read though nothing has written it. An empty list proves that no other timing of the same
    operations could have had another result. `trace` is that of a `Runtime(workers, record=True)`.
    Cost: O(operations x channels). Source: vector clocks (Mattern, 'Virtual time and global states of distributed
    systems', 1989); race detection by them as in DJIT (Pozniansky and Schuster, 2003).
    """
    found: list[str] = []
    clocks: dict[tuple[int, str], Clock] = defaultdict(dict)
    at: dict[object, Clock] = {}
    written: dict[Location, _Use] = {}
    read: dict[Location, list[_Use]] = defaultdict(list)
    for access in trace:
        clock = dict(clocks[access.channel])
        for event in access.waits:
            for channel, tick in at.get(event, {}).items():
                clock[channel] = max(clock.get(channel, 0), tick)
        tick = clock[access.channel] = clock.get(access.channel, 0) + 1
        clocks[access.channel] = at[access.event] = clock
        use = _Use(access, tick)
        for place in access.reads:
            last = written.get(place)
            if last is None and not _is_given(place):
                found.append(f"{_name(access)} reads {_words(place)}, which nothing has written before")
            if last is not None and not _ordered(last, clock):
                found.append(
                    f"{_name(access)} reads {_words(place)}, and nothing orders that after {_name(last.access)}"
                )
            read[place].append(use)
        for place in access.writes:
            for other in (*read.pop(place, ()), *([written[place]] if place in written else ())):
                if other.access is not access and not _ordered(other, clock):
                    found.append(
                        f"{_name(access)} writes {_words(place)}, and nothing orders that after {_name(other.access)}"
                    )
            written[place] = use
    return found


def _ordered(before: _Use, clock: Clock) -> bool:
    return before.tick <= clock.get(before.access.channel, 0)


def _is_given(place: Location) -> bool:
    """Whether a place has a value from the start: parameters that no step has made, sums before the first."""
    kind, *rest = place
    return kind == "sums" or (kind == "main" and isinstance(rest[0], int) and rest[0] <= 0)


def _name(access: Access) -> str:
    (worker, channel), event = access.channel, access.event
    return f"{event.what} of {event.subject} in iteration {event.iteration} ({channel}, worker {worker})"


def _words(place: Location) -> str:
    kind, *rest = place
    return f"{kind} {', '.join(map(str, rest))}"
