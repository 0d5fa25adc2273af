"""Waiting that an interrupt always ends.

A signal that arrives just before a thread blocks is seen only when it wakes (the interpreter looks for signals between
its steps, and a lock that is being acquired is no step). So nothing here blocks for longer than a moment at a time. A
thread that signals do not reach can be told, too, that what it waits for has become pointless: it calls a `check` each
moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

MOMENT_S = 0.5
"""How late an interrupt may be."""


def never() -> None:
    """Raises nothing."""


def wait_until(
    condition: threading.Condition, predicate: Callable[[], bool], check: Callable[[], None] = never
) -> None:
    """Returns once the predicate holds; the caller holds the condition. Ends by what `check` raises, if it does."""
    while not condition.wait_for(predicate, timeout=MOMENT_S):
        check()


def sleep_until(end_s: float, check: Callable[[], None] = never) -> None:
    """Returns at a time of `time.perf_counter`. Ends by what `check` raises, if it does."""
    while (left := end_s - time.perf_counter()) > 0:
        check()
        time.sleep(min(left, MOMENT_S))


def acquire(lock: threading.Lock) -> None:
    """Acquires the lock."""
    while not lock.acquire(timeout=MOMENT_S):
        pass


def join(thread: threading.Thread) -> None:
    """Returns once the thread has ended; at once if it has not begun."""
    while thread.is_alive():
        thread.join(MOMENT_S)


def result_of(future: Future[T]) -> T:
    """Returns the future's result, or raises its error, once it is there."""
    done(future)
    return future.result()


def done(future: Future[Any]) -> None:
    """Returns once the future's result or error is there."""
    while not wait([future], timeout=MOMENT_S).done:
        pass


def fulfil(future: Future[T], function: Callable[[], T]) -> None:
    """Lets the future have what the function returns or raises."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
