"""Running a schedule: each worker takes its tasks in order and waits for what they depend on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from rpfunc.plan.plan import Plan
from rpfunc.runtime.workers import Runtime
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.timeline import Event, Timeline
from rpfunc.schedule.workload import Workload


class Dispatch:
    """A schedule in flight on a runtime; `run(task)` does a task's work.

    A failed task stops all others before their next task, so nothing waits for work that will not come.
    """

    def __init__(
        self, runtime: Runtime, schedule: Schedule, work: Workload, plan: Plan, run: Callable[[Task], None]
    ) -> None:
        self._schedule, self._work, self._plan, self._run = schedule, work, plan, run
        self._changed = threading.Condition()
        self._ended: set[Task] = set()
        self._events: list[Event] = []
        self._failure: BaseException | None = None
        self._working = len(schedule.workers)
        # autocast belongs to a thread: workers take the caller's over
        self._autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        runtime.submit([partial(self._serve, worker) for worker in range(len(schedule.workers))])

    def wait(self) -> Timeline:
        """Returns the timeline once every task has ended; raises the first failure, its task named in a note.

        If the wait itself is interrupted (KeyboardInterrupt), running tasks end, the rest are dropped, and the
        interrupt goes on.
        """
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._working == 0)
        except BaseException:
            self.cancel()
            raise
        if self._failure is not None:
            raise self._failure
        return Timeline(tuple(sorted(self._events, key=lambda event: event.start_s)), len(self._schedule.workers))

    def cancel(self) -> None:
        """Drops the tasks that have not begun and returns once the workers are free. Harmless after the end."""
        with self._changed:
            if self._working and self._failure is None:
                self._failure = RuntimeError("cancelled")
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._working == 0)

    def _serve(self, worker: int) -> None:
        try:
            for task in self._schedule.workers[worker]:
                if not self._await_dependencies(task):
                    return
                start_s = time.perf_counter()
                try:
                    enabled, dtype = self._autocast
                    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=enabled):
                        self._run(task)  # gradients come from torch.func.vjp alone
                except BaseException as error:
                    span = self._plan.span(task.kind, task.stage)
                    error.add_note(
                        f"rpfunc: in task {task} (layers {span}, microbatch {task.microbatch}) on worker {worker}"
                    )
                    raise
                event = Event(worker, "compute", task, start_s, time.perf_counter())
                with self._changed:
                    self._events.append(event)
                    self._ended.add(task)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _await_dependencies(self, task: Task) -> bool:
        needed = self._work.dependencies(task)
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._ended.issuperset(needed))
            return self._failure is None
