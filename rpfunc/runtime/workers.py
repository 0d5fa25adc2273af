"""Worker specifications and the runtime that owns their threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from rpfunc.errors import OptionsError
from rpfunc.meter import Meter
from rpfunc.plan.checks import is_count
from rpfunc.runtime.cuda import open_cuda
from rpfunc.runtime.device import Device, Link, LinkedCpu
from rpfunc.runtime.operations import CHANNELS_OF_WORKER
from rpfunc.runtime.trace import Recorder
from rpfunc.schedule.timeline import HOST

MOST_THREADS = 4096
"""More intra-op threads than this no machine has."""

Channel = tuple[int, str]
"""A worker's index (or HOST) and the name of one of its channels."""

UPDATE: Channel = (HOST, "update")
"""The optimizer's channel."""


@dataclass(frozen=True)
class Cpu:
    """A CPU worker: one thread, whose tensor operations use `threads` cores (intra-op threads).

    link          None: it works on the host's memory itself, and nothing is copied. With a `Link` it plays a device:
                  whatever it reads and hands on is copied, by four more threads
    memory_bytes  the most that it may hold: what its tasks make while they run, and with a link the buffers that are
                  copied to and from. What an iteration will need is known before it starts, and refused if it is
                  more: that takes a second or a few, once for a runtime's batches of one shape. What is really held
                  is measured, which costs some 10 us an operation (`Result.peak_bytes`).
                  None: it holds what it needs, and nothing is measured
    """

    threads: int = 1
    link: Link | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.threads, int) or not 1 <= self.threads <= MOST_THREADS:
            bound = f"at most {MOST_THREADS}" if isinstance(self.threads, int) and self.threads > 0 else "at least 1"
            raise OptionsError(f"worker: threads is {self.threads}, it must be {bound}")
        if self.link is not None and not isinstance(self.link, Link):
            raise OptionsError(f"worker: link is {self.link!r}, needs a Link or None")
        if self.memory_bytes is not None and (not is_count(self.memory_bytes) or self.memory_bytes < 1):
            raise OptionsError(f"worker: memory_bytes is {self.memory_bytes!r}, it must be at least 1 byte, or None")

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of its channels."""
        return CHANNELS_OF_WORKER[: 1 if self.link is None else None]

    def open(self, index: int) -> Device | None:
        """Returns the device that it is, or None if it works on the host's memory."""
        return None if self.link is None else LinkedCpu(self.link, index)


@dataclass(frozen=True)
class Cuda:
    """A worker on a GPU, with memory of its own; several on one GPU share it. Nothing is asked of CUDA before it opens.

    index         of the GPU
    memory_bytes  the most that tensors may take there, of the whole process and from the worker's opening on, which
                  starts torch's peak statistics anew; beyond it a task fails with torch.OutOfMemoryError. None: all
    """

    index: int = 0
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.index, int) or isinstance(self.index, bool) or self.index < 0:
            problems.append(f"index is {self.index!r}, it must be a number from 0")
        if self.memory_bytes is not None and (not isinstance(self.memory_bytes, int) or self.memory_bytes < 1):
            problems.append(f"memory_bytes is {self.memory_bytes!r}, it must be at least 1, or None")
        if problems:
            raise OptionsError.listing("worker", problems)

    @property
    def threads(self) -> int:
        """Intra-op threads of each of its channels."""
        return 1

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of its channels."""
        return CHANNELS_OF_WORKER

    def open(self, index: int) -> Device:
        """Returns the device that it is. Raises OptionsError where there is none such."""
        del index  # which worker it is
        return open_cuda(self.index, self.memory_bytes)


_INTRA_OP_THREADS = threading.Lock()
"""Held while torch's count for the whole process is changed: two runtimes may be entered at once."""


class Runtime:
    """Worker threads and the round-robin cursor, for the length of a `with` block.

    Without workers the caller's own thread does the work, as worker 0. One more thread serves the optimizer where it
    works beside the workers. With `record`, `recorder.trace` has what each operation has read and written, of which
    `rpfunc.testing.races` proves that events order it.

    >>> with Runtime([Cpu(), Cpu()]) as runtime:
    ...     runtime.num_workers
    2
    """

    def __init__(self, workers: Sequence[Cpu | Cuda] = (), *, record: bool = False) -> None:
        self.workers = tuple(workers)
        odd = [worker for worker in self.workers if not isinstance(worker, Cpu | Cuda)]
        if odd:
            raise OptionsError(f"runtime: {odd[0]!r} is no worker, needs specs such as [Cpu(threads=1)]")
        self.num_workers = max(1, len(self.workers))
        self.cursor = 0
        self.recorder = Recorder(record)
        self.meters = [
            Meter(worker.memory_bytes, f"worker {index}")
            if isinstance(worker, Cpu) and worker.memory_bytes is not None
            else None
            for index, worker in enumerate(self.workers)
        ] or [None]
        self.devices: list[Device | None] = [worker.open(index) for index, worker in enumerate(self.workers)] or [None]
        self._queues: dict[Channel, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._submitting = threading.Lock()

    @property
    def is_inline(self) -> bool:
        """Whether the caller's own thread does the work."""
        return not self.workers

    @property
    def shares_memory(self) -> list[bool]:
        """Of each worker, whether it works on the host's memory."""
        return [device is None for device in self.devices]

    def __enter__(self) -> Self:
        if self._threads:
            raise OptionsError("runtime: is entered already, each `with` block needs a Runtime of its own")
        if self.is_inline:
            return self
        channels = {(index, name): spec.threads for index, spec in enumerate(self.workers) for name in spec.channels}
        # Setting a worker's own count also sets what threads started later will get: that is put back.
        with _INTRA_OP_THREADS:
            process_threads = torch.get_num_threads()
            started = threading.Barrier(len(channels) + 2)
            for (worker, name), threads in (*channels.items(), (UPDATE, 1)):
                jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
                title = {"compute": f"rpfunc-worker-{worker}", "update": "rpfunc-update"}
                # A daemon: a program that forgets to leave the block can still end.
                thread = threading.Thread(
                    target=_serve,
                    args=(threads, jobs, started),
                    name=title.get(name, f"rpfunc-worker-{worker}-{name}"),
                    daemon=True,
                )
                thread.start()
                self._queues[worker, name] = jobs
                self._threads.append(thread)
            started.wait()
            torch.set_num_threads(process_threads)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._submitting:  # what is submitted from now on is refused, not lost
            for jobs in self._queues.values():
                jobs.put(None)
            threads, self._queues, self._threads = self._threads, {}, []
        for thread in threads:
            thread.join()

    def submit(self, jobs: Mapping[Channel, Callable[[], None]]) -> None:
        """Gives channels their jobs, to be run after those they have. Jobs must not raise.

        All channels get theirs in one step: two callers' jobs stand in the same order everywhere, so neither can
        wait for the other in a circle. Raises OptionsError outside the `with` block.
        """
        if self.is_inline:
            for job in jobs.values():
                job()
            return
        if threading.current_thread() in self._threads:
            raise OptionsError("runtime: one of its own tasks calls it, and would wait for itself; use another Runtime")
        with self._submitting:
            if not self._threads:
                raise OptionsError(
                    "runtime: its threads live in a `with` block only: `with Runtime(workers) as runtime:`"
                )
            for channel, job in jobs.items():
                self._queues[channel].put(job)


def _serve(threads: int, jobs: queue.SimpleQueue[Callable[[], None] | None], started: threading.Barrier) -> None:
    torch.get_num_threads()  # a thread's first use takes the process's count over: let that happen before
    torch.set_num_threads(threads)
    started.wait()
    while (job := jobs.get()) is not None:
        job()
        del job  # hold nothing of it while waiting for the next one
