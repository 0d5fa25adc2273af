"""Simulating a schedule together with its transfers between workers and host."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from rpfunc.plan.costs import StageCosts
from rpfunc.plan.hardware import Hardware
from rpfunc.schedule.activities import activities
from rpfunc.schedule.links import Links
from rpfunc.schedule.task import Schedule
from rpfunc.schedule.timeline import CHANNELS, HOST, Event, Timeline
from rpfunc.schedule.validate import validate
from rpfunc.schedule.workload import Workload


def with_transfers(schedule: Schedule, costs: StageCosts, hardware: Hardware, work: Workload) -> Timeline:
    """Returns the timeline of computation and transfers, event by event; `activities` has the rules of what waits.

    Each worker has a link in each direction, full duplex. On it activations come first, those of earlier tasks before
    those of later ones, and pause parameters and gradients, which would be sent in small pieces. `latency` passes
    after a transfer until what it brought is there. Transfers of no bytes do not happen, those that take no time leave
    no event.
    """
    todo = activities(schedule, costs, hardware, work)
    ranges, tasks, workers, amounts, awaited, (first_start, at_start), (first_end, at_end) = todo
    channels = [channel for channel, numbers in zip(CHANNELS, ranges, strict=True) for _ in numbers]
    lanes: dict[tuple[int, str], list[Event]] = {
        (worker, channel): [] for worker in (*range(len(schedule.workers)), HOST) for channel in CHANNELS
    }
    lane_of = [lanes[lane] for lane in zip(workers, channels, strict=True)]

    def record(number: int, start: float, end: float) -> None:
        if end > start or links[number] is None:
            lane_of[number].append(Event(workers[number], channels[number], tasks[number], start, end))

    _, _, _, parameters, gradients, _ = ranges
    up = Links(hardware.upload, hardware.host_upload, workers, amounts, parameters.start, record)
    down = Links(hardware.download, hardware.host_download, workers, amounts, gradients.start, record)
    by_range = zip((None, up, down, up, down, None), ranges, strict=True)
    links = [link for link, numbers in by_range for _ in numbers]
    latency = hardware.latency or 0  # 0.0 would make floats of fractions
    now: float = 0
    ending: list[tuple[float, int]] = []
    ready = [number for number, count in enumerate(awaited) if not count]

    def release(numbers: list[int]) -> None:
        for number in numbers:
            awaited[number] -= 1
            if not awaited[number]:
                ready.append(number)

    while now < math.inf:
        while ready:
            number = ready.pop()
            link, amount = links[number], amounts[number]
            if link is None:
                record(number, now, now + amount)
                heappush(ending, (now + amount, number))
                release(at_start[first_start[number] : first_start[number + 1]])
            elif amount and not link.is_instant:
                link.add(number)
            else:
                heappush(ending, (now + latency if amount else now, number))
        if ending and ending[0][0] <= now:
            _, number = heappop(ending)
            release(at_end[first_end[number] : first_end[number + 1]])
            continue
        # only here, when all that starts at this moment is known, is it decided whose turn it is
        for direction in (up, down):
            if direction.changed:
                direction.dispatch(now)
        now = min(up.next_end, down.next_end, ending[0][0] if ending else math.inf)
        for direction in (up, down):
            if direction.next_end <= now < math.inf:
                for number in direction.end():
                    if latency:
                        heappush(ending, (now + latency, number))
                    else:
                        release(at_end[first_end[number] : first_end[number + 1]])
    if any(awaited):
        validate(schedule, work)  # which says who waits for ever
        raise AssertionError("simulate: tasks wait for ever in a schedule that validate accepts")
    return Timeline(tuple(event for lane in lanes.values() for event in lane), len(schedule.workers))
