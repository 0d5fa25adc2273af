"""Waiting that an interrupt always ends.

A signal that arrives just before a thread blocks is seen only when it wakes (the interpreter looks for signals between
its steps, and a lock that is being acquired is no step). So nothing here blocks for longer than a moment at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

MOMENT_S = 0.5
"""How late an interrupt may be."""


def wait_until(condition: threading.Condition, predicate: Callable[[], bool]) -> None:
    """Returns once the predicate holds; the caller holds the condition."""
    while not condition.wait_for(predicate, timeout=MOMENT_S):
        pass


def acquire(lock: threading.Lock) -> None:
    """Acquires the lock."""
    while not lock.acquire(timeout=MOMENT_S):
        pass


def result_of(future: Future[T]) -> T:
    """Returns the future's result, or raises its error, once it is there."""
    while not wait([future], timeout=MOMENT_S).done:
        pass
    return future.result()
