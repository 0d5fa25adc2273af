"""The links between workers and host, in one direction: who transfers now, and when the next transfer ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

IDLE = -1


class Links:
    """One link a worker. Each does one transfer at a time, the lowest number first; the higher ones can be paused.

    All busy links have the same speed: the link's own, or an equal part of the host's. So one clock, which counts the
    bytes that a busy link moves, does for all of them: a transfer that starts when it shows c ends when it shows c plus
    its bytes, however the speed changes meanwhile. A start, pause or end costs O(log workers).
    Source: own; the clock is the virtual time of processor sharing.

    workers     the worker of each transfer, by number
    bytes_left  of each transfer, by number; changed in place by pauses
    pausable    numbers from here on give way to those below
    record      is given the number, start and end of each unbroken piece of a transfer

    `next_end` is when the next transfer ends if nothing changes, `changed` the workers for which `dispatch` is due.
    """

    def __init__(
        self,
        link_rate: float,
        host_rate: float,
        workers: Sequence[int],
        bytes_left: list[float],
        pausable: int,
        record: Callable[[int, float, float], None],
    ) -> None:
        num_links = max(workers, default=0) + 1
        self.is_instant = link_rate == host_rate == math.inf
        self.next_end = math.inf
        self.changed: set[int] = set()
        self._link_rate, self._host_rate, self._pausable = link_rate, host_rate, pausable
        self._workers, self._bytes_left, self._record = workers, bytes_left, record
        self._waiting: list[list[int]] = [[] for _ in range(num_links)]
        self._running = [IDLE] * num_links
        self._since: list[float] = [0] * num_links
        self._until: list[float] = [0] * num_links  # what the clock will show when the running transfer ends
        self._ending: list[tuple[float, int]] = []
        self._num_busy = 0
        self._clock: float = 0  # whole numbers, so that fractions stay fractions
        self._clock_time: float = 0
        self._speed: float = 0

    def add(self, number: int) -> None:
        """Takes a transfer in; it starts in `dispatch`, once all that could start at that moment is known."""
        worker = self._workers[number]
        heappush(self._waiting[worker], number)
        self.changed.add(worker)

    def end(self) -> list[int]:
        """Returns the transfers that end at `next_end`; to be called when it is that late."""
        ended = []
        ending, running, until, workers = self._ending, self._running, self._until, self._workers
        self._clock, self._clock_time = clock, now = ending[0][0], self.next_end
        while ending and ending[0][0] <= clock:
            shown, number = heappop(ending)
            worker = workers[number]
            if running[worker] == number and until[worker] == shown:
                self._stop(worker, now)
                self.changed.add(worker)
                ended.append(number)
        return ended

    def dispatch(self, now: float) -> None:
        """Starts on every link the transfer whose turn it is, and pauses the one that has to give way."""
        self._clock = clock = self._clock + (now - self._clock_time) * self._speed
        self._clock_time = now
        ending, running, until, workers = self._ending, self._running, self._until, self._workers
        for worker in self.changed:
            waiting, current = self._waiting[worker], running[worker]
            if waiting and current >= self._pausable > waiting[0]:
                self._bytes_left[current] = until[worker] - clock
                self._stop(worker, now)
                heappush(waiting, current)
                current = IDLE
            if waiting and current == IDLE:
                running[worker] = number = heappop(waiting)
                self._since[worker] = now
                until[worker] = clock + self._bytes_left[number]
                heappush(ending, (until[worker], number))
                self._num_busy += 1
        self.changed.clear()
        while ending:
            shown, number = ending[0]
            worker = workers[number]
            if running[worker] == number and until[worker] == shown:
                self._speed = min(self._link_rate, self._host_rate / self._num_busy)
                self.next_end = now + max(0, shown - clock) / self._speed
                return
            heappop(ending)  # which a pause has left behind
        self._speed, self.next_end = 0, math.inf

    def _stop(self, worker: int, now: float) -> None:
        self._record(self._running[worker], self._since[worker], now)
        self._running[worker] = IDLE
        self._num_busy -= 1
