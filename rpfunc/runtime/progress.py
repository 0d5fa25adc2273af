"""What has happened in a run: events, each recorded once, that any thread may wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from rpfunc.runtime.waiting import acquire


class Happened(NamedTuple):
    """An event's name: which iteration, what happened (a channel's work, or 'version'), to what."""

    iteration: int
    what: str
    subject: Any


class Stopped(Exception):  # noqa: N818  (no fault of its own: it ends what another fault has made pointless)
    """The run has failed in this iteration or an earlier one; what is waited for may never come."""


class Progress:
    """The events of one run, and its first failure.

    A failure in an iteration stops the work of that one and of later ones, whose parameters will never come; earlier
    ones go on. Each waiting thread is woken once, when the last of what it waits for has happened.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._happened: set[Happened] = set()
        self._waiting: dict[Happened, list[_Waiter]] = {}
        self._oldest = 0
        self._failure: tuple[int, BaseException] | None = None

    def wait(self, events: Iterable[Happened], iteration: int) -> None:
        """Returns once all `events` have been recorded. Raises Stopped if the run fails up to `iteration`."""
        with self._lock:
            self.check(iteration)
            missing = {each for each in events if each not in self._happened and each.iteration >= self._oldest}
            if not missing:
                return
            waiter = _Waiter(missing, iteration)
            for each in missing:
                self._waiting.setdefault(each, []).append(waiter)
        acquire(waiter.ready)
        with self._lock:
            self.check(iteration)

    def check(self, iteration: int) -> None:
        """Raises Stopped if the run has failed up to `iteration`."""
        failure = self._failure
        if failure is not None and failure[0] <= iteration:
            raise Stopped

    def record(self, event: Happened) -> None:
        """Notes that `event` has happened, for good."""
        with self._lock:
            self._happened.add(event)
            for waiter in self._waiting.pop(event, ()):
                waiter.missing.discard(event)
                if not waiter.missing:
                    waiter.wake()

    def fail(self, error: BaseException, iteration: int) -> None:
        """Stops `iteration` and later ones; the failure of the earliest iteration counts, of those the first."""
        with self._lock:
            if self._failure is None or iteration < self._failure[0]:
                self._failure = iteration, error
            for waiters in self._waiting.values():
                for waiter in waiters:
                    if waiter.iteration >= self._failure[0]:
                        waiter.wake()

    def failure(self, iteration: int) -> BaseException | None:
        """Returns what stopped `iteration`, or None."""
        with self._lock:
            return self._failure[1] if self._failure is not None and self._failure[0] <= iteration else None

    def forget(self, iteration: int) -> None:
        """Lets go of the events before `iteration`, all of which have happened."""
        with self._lock:
            self._oldest = iteration
            self._happened = {each for each in self._happened if each.iteration >= iteration}


class _Waiter:
    """A thread that waits: `ready` is a lock held until it may go on."""

    def __init__(self, missing: set[Happened], iteration: int) -> None:
        self.missing, self.iteration = missing, iteration
        self.ready = threading.Lock()
        self.ready.acquire()

    def wake(self) -> None:
        """Lets the thread go on; harmless if it may already."""
        if self.ready.locked():
            self.ready.release()
