"""Worker specifications and the runtime that owns their threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from rpfunc.errors import OptionsError

MOST_THREADS = 4096
"""More intra-op threads than this no machine has."""


@dataclass(frozen=True)
class Cpu:
    """A CPU worker: one thread, whose tensor operations use `threads` cores (intra-op threads)."""

    threads: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.threads, int) or not 1 <= self.threads <= MOST_THREADS:
            bound = f"at most {MOST_THREADS}" if isinstance(self.threads, int) and self.threads > 0 else "at least 1"
            raise OptionsError(f"worker: threads is {self.threads}, it must be {bound}")


_INTRA_OP_THREADS = threading.Lock()
"""Held while torch's count for the whole process is changed: two runtimes may be entered at once."""


class Runtime:
    """Worker threads and the round-robin cursor, for the length of a `with` block.

    Without workers the caller's own thread does the work, as worker 0.

    >>> with Runtime([Cpu(), Cpu()]) as runtime:
    ...     runtime.num_workers
    2
    """

    def __init__(self, workers: Sequence[Cpu] = ()) -> None:
        self.workers = tuple(workers)
        odd = [worker for worker in self.workers if not isinstance(worker, Cpu)]
        if odd:
            raise OptionsError(f"runtime: {odd[0]!r} is no worker, needs specs such as [Cpu(threads=1)]")
        self.num_workers = max(1, len(self.workers))
        self.cursor = 0
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._submitting = threading.Lock()

    def __enter__(self) -> Self:
        if self._threads:
            raise OptionsError("runtime: is entered already, each `with` block needs a Runtime of its own")
        # Setting a worker's own count also sets what threads started later will get: that is put back.
        with _INTRA_OP_THREADS:
            process_threads = torch.get_num_threads()
            started = threading.Barrier(len(self.workers) + 1)
            for index, worker in enumerate(self.workers):
                jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
                # A daemon: a program that forgets to leave the block can still end.
                thread = threading.Thread(
                    target=_serve, args=(worker, jobs, started), name=f"rpfunc-worker-{index}", daemon=True
                )
                thread.start()
                self._queues.append(jobs)
                self._threads.append(thread)
            started.wait()
            torch.set_num_threads(process_threads)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._submitting:  # what is submitted from now on is refused, not lost
            for jobs in self._queues:
                jobs.put(None)
            threads, self._queues, self._threads = self._threads, [], []
        for thread in threads:
            thread.join()

    def submit(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Gives each worker its job, to be run after those it has. Jobs must not raise.

        All workers get theirs in one step: two callers' jobs stand in the same order everywhere, so neither can
        wait for the other in a circle. Raises OptionsError outside the `with` block.
        """
        if not self.workers:
            jobs[0]()
            return
        if threading.current_thread() in self._threads:
            raise OptionsError("runtime: one of its own tasks calls it, and would wait for itself; use another Runtime")
        with self._submitting:
            if not self._threads:
                raise OptionsError(
                    "runtime: its threads live in a `with` block only: `with Runtime(workers) as runtime:`"
                )
            for inbox, job in zip(self._queues, jobs, strict=True):
                inbox.put(job)


def _serve(worker: Cpu, jobs: queue.SimpleQueue[Callable[[], None] | None], started: threading.Barrier) -> None:
    torch.get_num_threads()  # a thread's first use takes the process's count over: let that happen before
    torch.set_num_threads(worker.threads)
    started.wait()
    while (job := jobs.get()) is not None:
        job()
        del job  # hold nothing of it while waiting for the next one
