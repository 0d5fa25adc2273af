"""How much memory a computation really takes: the exact peak of live tensor bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from rpfunc.errors import OptionsError

_PROFILING = threading.Lock()
"""Held while torch's profiler runs: there is one in a process, and a second one would end it."""


class Peak(NamedTuple):
    """What `peak` found: the most bytes live at one time, those still live at the end, and what was returned."""

    peak_bytes: int
    kept_bytes: int
    result: Any


def peak(function: Callable[[], Any]) -> Peak:
    """Returns the exact peak of live tensor bytes while `function()` runs, above what was live before.

    CPU: every allocation and release, from the profiler's allocator events. They cover the calling thread alone, so
    measure work that runs in the caller's thread (`workers=None`), or call this inside a worker. CUDA, where it is
    initialised: the caching allocator's own peak. Slows `function` down somewhat; do not time it at once.
    Threads take turns. torch's profiler may write lines of its own to stderr. Raises OptionsError inside a measurement
    or profile of the same thread.

    >>> peak(lambda: (torch.zeros(100) + torch.zeros(100)).sum().item()).peak_bytes
    1200
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        torch.cuda.synchronize()
        return Peak(torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before, result)
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        raise OptionsError("memory.peak: a profile or another measurement is running here; torch has one at a time")
    with _PROFILING, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = list(accumulate((event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), initial=0))
    return Peak(max(live), live[-1], result)
