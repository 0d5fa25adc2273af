"""What ran where and when: the record of a run, and of a simulation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rpfunc.schedule.task import Task

CHANNELS = (
    "compute",
    "activation_upload",
    "activation_download",
    "parameter_upload",
    "gradient_download",
    "update",
)
"""What goes on side by side: a worker's computation and its transfers, and the optimizer on the host."""

KIND_NAMES = {"F": "forward", "X": "fused", "B": "backward", "I": "input gradient", "W": "weight gradient"}

HOST = -1
"""The `worker` of what runs on the host: updates."""


class Event(NamedTuple):
    """Something that took a channel from start to end, in seconds or the unit of the costs; waiting is not part of it.

    The task is the one that was computed, or whose activations were moved; the first one that needed the uploaded
    parameters; the last one that gave the downloaded gradients; the last one of the iteration whose update ran. A
    transfer that was interrupted has several events.
    """

    worker: int
    channel: str
    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Events of `num_workers` workers, on one clock.

    resident  stages stayed on their workers with all that these had, see `simulate`; `report` counts bytes so
    """

    events: tuple[Event, ...]
    num_workers: int
    resident: bool = False

    @property
    def makespan_s(self) -> float:
        """Time from the first start to the last end, of updates too; 0 without events."""
        first, last = _window(self.events)
        return last - first

    @property
    def window_s(self) -> tuple[float, float]:
        """The first start and last end of what workers do, tasks and transfers; updates on the host are no part."""
        return _window(event for event in self.events if event.channel != "update")

    @property
    def bubble(self) -> float:
        """The share of the workers' time, `window_s` for each, in which they compute nothing; 0 to 1."""
        first, last = self.window_s
        busy = sum(event.end_s - event.start_s for event in self.events if event.channel == "compute")
        available = self.num_workers * (last - first)
        return 1 - busy / available if available else 0.0

    @property
    def shown(self) -> list[Event]:
        """What is drawn: tasks, and of the rest what takes time."""
        return [event for event in self.events if event.channel == "compute" or event.end_s > event.start_s]

    def chrome_trace(self) -> str:
        """Returns the timeline as Chrome trace JSON, which Perfetto and chrome://tracing open (times in µs).

        There is one track for each channel that a worker uses, its computation first; the host comes last.
        """
        origin = min((event.start_s for event in self.events), default=0.0)
        used = {(event.worker, event.channel) for event in self.shown}
        used |= {(worker, "compute") for worker in range(self.num_workers)}
        tracks = sorted(used, key=lambda track: (track[0] == HOST, track[0], CHANNELS.index(track[1])))
        threads = {track: thread for thread, track in enumerate(tracks)}
        names = [
            {"ph": "M", "pid": 0, "tid": thread, "name": f"thread_{what}", "args": {what: value}}
            for track, thread in threads.items()
            for what, value in (("name", track_name(*track)), ("sort_index", thread))
        ]
        spans = [
            {
                "ph": "X",
                "pid": 0,
                "tid": threads[event.worker, event.channel],
                "name": str(event.task),
                "cat": event.channel,
                "ts": float(event.start_s - origin) * 1e6,
                "dur": float(event.end_s - event.start_s) * 1e6,
                "args": event.task._asdict(),
            }
            for event in self.shown
        ]
        return json.dumps({"traceEvents": names + spans, "displayTimeUnit": "ms"})


def every_second_stage(timeline: Timeline) -> set[Task]:
    """Returns the tasks to draw lighter: where a worker goes on to another stage, for each kind, this changes."""
    last: dict[tuple[int, str], int] = {}
    odd: dict[tuple[int, str], bool] = {}
    found = set()
    for worker, channel, task, _, _ in timeline.events:
        if channel == "compute":
            key = worker, task.kind
            odd[key] = odd.get(key, True) ^ (last.get(key) != task.stage)
            last[key] = task.stage
            if odd[key]:
                found.add(task)
    return found


def track_name(worker: int, channel: str) -> str:
    """Returns the words for a track.

    >>> track_name(2, "parameter_upload")
    'worker 2 parameter upload'
    """
    place = "host" if worker == HOST else f"worker {worker}"
    return place if channel == "compute" else f"{place} {channel.replace('_', ' ')}"


def _window(events: Iterable[Event]) -> tuple[float, float]:
    first, last = math.inf, -math.inf
    for event in events:
        first, last = min(first, event.start_s), max(last, event.end_s)
    return (first, last) if first < math.inf else (0.0, 0.0)
