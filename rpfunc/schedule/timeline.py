"""What ran where and when: the record of a run, and of a simulation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from rpfunc.schedule.task import Task


class Event(NamedTuple):
    """One task on one worker's channel, from start to end in seconds; waiting is not part of it."""

    worker: int
    channel: str
    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Events of `num_workers` workers, on one clock."""

    events: tuple[Event, ...]
    num_workers: int

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end; 0 without events."""
        if not self.events:
            return 0.0
        return max(event.end_s for event in self.events) - min(event.start_s for event in self.events)

    @property
    def bubble(self) -> float:
        """The share of the workers' time that no task fills, 0 to 1."""
        busy = sum(event.end_s - event.start_s for event in self.events)
        available = self.num_workers * self.makespan_s
        return 1.0 - busy / available if available else 0.0

    def chrome_trace(self) -> str:
        """Returns the timeline as Chrome trace JSON, which Perfetto and chrome://tracing open (times in µs)."""
        origin = min((event.start_s for event in self.events), default=0.0)
        names = [
            {"ph": "M", "pid": 0, "tid": worker, "name": "thread_name", "args": {"name": f"worker {worker}"}}
            for worker in range(self.num_workers)
        ]
        spans = [
            {
                "ph": "X",
                "pid": 0,
                "tid": event.worker,
                "name": str(event.task),
                "cat": event.channel,
                "ts": (event.start_s - origin) * 1e6,
                "dur": (event.end_s - event.start_s) * 1e6,
                "args": event.task._asdict(),
            }
            for event in self.events
        ]
        return json.dumps({"traceEvents": names + spans, "displayTimeUnit": "ms"})
