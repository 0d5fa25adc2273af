"""Worker specifications and the runtime that owns their threads."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from rpfunc.checks import flag_problems, is_count, shown
from rpfunc.errors import OptionsError, note
from rpfunc.meter import Meter
from rpfunc.runtime.cuda import open_cuda
from rpfunc.runtime.device import Device, Link, LinkedCpu
from rpfunc.runtime.operations import CHANNELS_OF_WORKER
from rpfunc.runtime.room import remembering
from rpfunc.runtime.trace import Recorder
from rpfunc.runtime.waiting import fulfil, join, result_of
from rpfunc.schedule.timeline import HOST

MOST_THREADS = 4096
"""More intra-op threads than this no machine has."""

Channel = tuple[int, str]
"""A worker's index (or HOST) and the name of one of its channels."""

UPDATE: Channel = (HOST, "update")
"""The optimizer's channel."""

Jobs = queue.SimpleQueue[Callable[[], None] | None]
"""What a thread is to do next; None: to end."""


@dataclass(frozen=True)
class Cpu:
    """A CPU worker: one thread, whose tensor operations use `threads` cores (intra-op threads).

    link          None: it works on the host's memory itself, and nothing is copied. With a `Link` it plays a device:
                  whatever it reads and hands on is copied, by four more threads
    memory_bytes  the most that it may hold: what its tasks make while they run, parameters that it casts, and with a
                  link the buffers that are copied to and from. What an iteration will need is known before it starts,
                  and refused if it is more: that takes a second or a few, once for all batches of one shape that a
                  model is given on a runtime, which remembers the last 8 such answers. What is really held is
                  measured, which costs some 10 us an operation (`Result.peak_bytes`).
                  None: it holds what it needs, and nothing is measured
    """

    threads: int = 1
    link: Link | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not is_count(self.threads) or not 1 <= self.threads <= MOST_THREADS:
            bound = f"at most {MOST_THREADS}" if is_count(self.threads) and self.threads > 0 else "at least 1"
            problems.append(f"threads is {shown(self.threads)}, it must be {bound}")
        if self.link is not None and not isinstance(self.link, Link):
            problems.append(f"link is {shown(self.link)}, needs a Link or None")
        if self.memory_bytes is not None and (not is_count(self.memory_bytes) or self.memory_bytes < 1):
            problems.append(f"memory_bytes is {shown(self.memory_bytes)}, it must be at least 1 byte, or None")
        if problems:
            raise OptionsError.listing("worker", problems)

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
        if not is_count(self.index) or self.index < 0:
            problems.append(f"index is {shown(self.index)}, it must be a number from 0")
        if self.memory_bytes is not None and (not is_count(self.memory_bytes) or self.memory_bytes < 1):
            problems.append(f"memory_bytes is {shown(self.memory_bytes)}, it must be at least 1, or None")
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
        return open_cuda(int(self.index), self.memory_bytes)


_INTRA_OP_THREADS = threading.Lock()
"""Held while torch's count for the whole process is changed: two runtimes may be entered at once."""


class Runtime:
    """Worker threads and the round-robin cursor, for the length of a `with` block.

    Without workers the caller's own thread does the work, as worker 0. One more thread serves the optimizer where it
    works beside the workers. With `record`, `recorder.trace` has what each operation has read and written, of which
    `rpfunc.testing.races` proves that events order it. An error or an interrupt while the block begins or ends leaves
    no thread, and torch's count of threads as it was.

    >>> with Runtime([Cpu(), Cpu()]) as runtime:
    ...     runtime.num_workers
    2
    """

    def __init__(self, workers: Sequence[Cpu | Cuda] = (), *, record: bool = False) -> None:
        if not isinstance(workers, Sequence) or isinstance(workers, str):
            raise OptionsError(f"runtime: workers is {shown(workers)}, needs specs such as [Cpu(threads=1)]")
        odd = [worker for worker in workers if not isinstance(worker, Cpu | Cuda)]
        if odd:
            raise OptionsError(f"runtime: {shown(odd[0])} is no worker, needs specs such as [Cpu(threads=1)]")
        problems = flag_problems({"record": record})
        if problems:
            raise OptionsError.listing("runtime", problems)
        self.workers = tuple(workers)
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
        self.sizes = remembering()
        self._block: _Block | None = None

    @property
    def is_inline(self) -> bool:
        """Whether the caller's own thread does the work."""
        return not self.workers

    @property
    def shares_memory(self) -> list[bool]:
        """Of each worker, whether it works on the host's memory."""
        return [device is None for device in self.devices]

    def __enter__(self) -> Self:
        if self._block is not None:
            raise OptionsError("runtime: is entered already, each `with` block needs a Runtime of its own")
        if self.is_inline:
            return self
        channels = {(index, name): spec.threads for index, spec in enumerate(self.workers) for name in spec.channels}
        channels[UPDATE] = 1
        try:
            queues: dict[Channel, Jobs] = {channel: queue.SimpleQueue() for channel in channels}
            # The threads end with the runtime, even if an interrupt comes before the first line of `__exit__`.
            ending = weakref.finalize(self, _end, tuple(queues.values()))
            ready: list[Future[None]] = [Future() for _ in channels]
            threads = [
                # A daemon: a program that forgets to leave the block can still end.
                threading.Thread(target=_serve, args=(int(count), jobs, here), name=_title(channel), daemon=True)
                for (channel, count), jobs, here in zip(channels.items(), queues.values(), ready, strict=True)
            ]
            started: Future[None] = Future()
            # Signals do not reach this thread: what it begins it brings to an end.
            opening = threading.Thread(
                target=fulfil, args=(started, partial(_start, threads, ready)), name="rpfunc-opening", daemon=True
            )
            self._block = _Block(queues, (opening, *threads), ending)
            opening.start()
            result_of(started)
            return self
        except BaseException:
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._leave()
        except BaseException:  # an interrupt, at whatever line
            self._leave()
            raise

    def _leave(self) -> None:
        block = self._block
        if block is None:
            return
        with block.submitting:  # what is submitted from now on is refused, not lost
            _end(block.queues.values())
            block.ending.detach()
            self._block = None
        for thread in block.threads:
            join(thread)

    @contextmanager
    def waiting_for_caller(self) -> Iterator[None]:
        """Tells, for the length of the block, that jobs wait for what the calling thread does in it."""
        block = self._block
        if block is None:
            yield
            return
        block.waited_for.append(threading.current_thread())
        try:
            yield
        finally:
            block.waited_for.remove(threading.current_thread())

    def submit(self, jobs: Mapping[Channel, Callable[[], None]]) -> None:
        """Gives channels their jobs, to be run after those they have. Jobs must not raise.

        All channels get theirs in one step: two callers' jobs stand in the same order everywhere, so neither can
        wait for the other in a circle. Raises OptionsError outside the `with` block.
        """
        if self.is_inline:
            for job in jobs.values():
                job()
            return
        block = self._block
        if block is not None:
            if os.getpid() != block.process:
                raise OptionsError(
                    "runtime: its threads live in the process that this one was forked from; use a Runtime of its own"
                )
            if threading.current_thread() in (*block.threads, *block.waited_for):
                raise OptionsError(
                    "runtime: one of its own tasks calls it, and would wait for itself; use another Runtime"
                )
            with block.submitting:
                if self._block is block:
                    for channel, job in jobs.items():
                        block.queues[channel].put(job)
                    return
        raise OptionsError("runtime: its threads live in a `with` block only: `with Runtime(workers) as runtime:`")


@dataclass(frozen=True)
class _Block:
    """What lives as long as a runtime's `with` block.

    threads     the one that starts the others comes first
    ending      does what the block's end does, should the runtime be gone before it
    process     whose threads they are
    waited_for  callers' threads that make what work on the channels waits for
    submitting  held while jobs are given out, and while the block ends: again by the same thread, if an interrupt has
                come between
    """

    queues: Mapping[Channel, Jobs]
    threads: Sequence[threading.Thread]
    ending: weakref.finalize[..., Any]
    process: int = field(default_factory=os.getpid)
    waited_for: list[threading.Thread] = field(default_factory=list)
    submitting: Any = field(default_factory=threading.RLock)


def _title(channel: Channel) -> str:
    worker, name = channel
    return {"compute": f"rpfunc-worker-{worker}", "update": "rpfunc-update"}.get(name, f"rpfunc-worker-{worker}-{name}")


def _start(threads: Sequence[threading.Thread], ready: Sequence[Future[None]]) -> None:
    """Starts threads, each of which sets its own count of intra-op threads.

    That also sets what threads started later will get: it is put back.
    """
    begun: list[Future[None]] = []
    with _INTRA_OP_THREADS:
        process_threads = torch.get_num_threads()  # a thread's first use takes the process's count over
        try:
            for thread, here in zip(threads, ready, strict=True):
                thread.start()
                begun.append(here)
        except RuntimeError as error:
            note(error, f"thread {len(begun) + 1} of a runtime's {len(threads)}; fewer workers need fewer")
            raise
        finally:
            wait(begun)
            torch.set_num_threads(process_threads)
    for here in begun:
        here.result()


def _serve(threads: int, jobs: Jobs, ready: Future[None]) -> None:
    fulfil(ready, partial(_take_threads, threads))
    while (job := jobs.get()) is not None:
        job()
        del job  # hold nothing of it while waiting for the next one


def _take_threads(threads: int) -> None:
    torch.get_num_threads()  # a thread's first use takes the process's count over: let that happen before
    torch.set_num_threads(threads)


def _end(queues: Iterable[Jobs]) -> None:
    """Lets the threads that serve those queues end when they have done what stands there."""
    for jobs in queues:
        jobs.put(None)
