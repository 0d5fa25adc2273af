"""Carrying out operations: each channel takes its own in order and waits for the events that they need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from rpfunc.errors import note
from rpfunc.plan.plan import Plan
from rpfunc.runtime.context import CallersContext
from rpfunc.runtime.operations import Line, Operation
from rpfunc.runtime.progress import Happened, Progress, Stopped
from rpfunc.runtime.waiting import wait_until
from rpfunc.runtime.workers import Runtime
from rpfunc.schedule.timeline import Event, Timeline


class Dispatch:
    """An iteration's operations in flight on a runtime; `perform` does the work of one.

    A failed operation stops all others of its iteration and of later ones before their next operation, so nothing
    waits for work that will not come.
    """

    def __init__(
        self,
        runtime: Runtime,
        progress: Progress,
        iteration: int,
        lines: Sequence[Line],
        plan: Plan,
        perform: Callable[[Operation], None],
    ) -> None:
        self._progress, self._iteration, self._plan, self._perform = progress, iteration, plan, perform
        self._context, self._recorder = CallersContext.here(), runtime.recorder
        self._ended = threading.Condition()
        self._events: list[Event] = []
        jobs = {
            (worker, channel): partial(self._serve, own)
            for worker, line in enumerate(lines)
            for channel, own in line.items()
        }
        self._working, self._num_workers = len(jobs), len(lines)
        runtime.submit(jobs)

    def wait(self) -> Timeline:
        """Returns the timeline once every operation has ended; raises the first failure, its task named in a note.

        If the wait itself is interrupted (KeyboardInterrupt), running operations end, the rest are dropped, and the
        interrupt goes on.
        """
        try:
            with self._ended:
                wait_until(self._ended, lambda: self._working == 0)
        except BaseException:
            self.cancel()
            raise
        failure = self._progress.failure(self._iteration)
        if failure is not None:
            raise failure
        return Timeline(tuple(sorted(self._events, key=lambda event: event.start_s)), self._num_workers)

    def cancel(self) -> None:
        """Drops the operations that have not begun and returns once the channels are free. Harmless after the end.

        Those of the run's earlier iterations, too: channels come to this one's after them.
        """
        with self._ended:
            working = self._working
        if working:
            self._progress.fail(RuntimeError("cancelled"), 0)
        with self._ended:
            wait_until(self._ended, lambda: self._working == 0)

    def _serve(self, operations: Sequence[Operation]) -> None:
        operation: Operation | None = None
        try:
            with self._context.entered():
                for operation in operations:
                    worker, channel, task = operation[:3]
                    event, waits = Happened(self._iteration, channel, task), [wait.event for wait in operation.waits]
                    self._progress.wait(waits, self._iteration)
                    start_s = time.perf_counter()
                    with self._recorder.operation((worker, channel), event, waits):
                        self._perform(operation)
                    self._events.append(Event(worker, channel, task, start_s, time.perf_counter()))
                    self._progress.record(event)
        except Stopped:
            pass
        except BaseException as error:
            if operation is not None:  # or the caller's context could not be entered
                self._note(error, operation)
            self._progress.fail(error, self._iteration)
        finally:
            with self._ended:
                self._working -= 1
                self._ended.notify_all()

    def _note(self, error: BaseException, operation: Operation) -> None:
        worker, channel, task = operation[:3]
        span = self._plan.span(task.kind, task.stage)
        doing = "in" if channel == "compute" else f"in the {channel.replace('_', ' ')} of"
        note(error, f"{doing} task {task} (layers {span}, microbatch {task.microbatch}) on worker {worker}")
