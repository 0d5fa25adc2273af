"""A second simulator, of processes that wait for events (simpy), which shares no code with the first.

Every worker, transfer and update is a process of its own; each direction of transfer has one that looks at all links
anew whenever a transfer is asked for or ends. Slow, and exact with fractions.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import simpy
from simpy.events import Event, EventPriority

LATE = EventPriority(2)
"""After all that simpy does at one moment by itself."""

Process = Generator[Event, Any, None]
Row = tuple[int, str, str, Any, Any]


def simulate(schedule: Any, costs: Any, hardware: Any, work: Any) -> list[Row]:
    """Returns (worker, channel, task, start, end) in order: computations, updates, unbroken pieces of transfers."""
    return Simulation(schedule, costs, hardware, work).run()


@dataclass(eq=False)
class Job:
    """A transfer that has been asked for."""

    name: tuple[int, str, str]
    background: bool
    rank: int
    left: Any
    ended: Event
    since: Any = None


@dataclass
class Direction:
    """All links one way."""

    env: simpy.Environment
    link_rate: Any
    host_rate: Any
    rows: list[Row]
    waiting: list[Job] = field(default_factory=list)
    running: dict[int, Job] = field(default_factory=dict)
    poked: Event | None = None

    def ask(self, job: Job) -> None:
        self.waiting.append(job)
        if self.poked is not None and not self.poked.triggered:
            self.poked.succeed()

    def serve(self) -> Process:
        while True:
            late = Event(self.env)
            late._ok, late._value = True, None
            self.env.schedule(late, priority=LATE)
            yield late
            for worker in {job.name[0] for job in self.waiting}:
                self.choose(worker)
            rate = min(self.link_rate, self.host_rate / max(1, len(self.running)))
            began = self.env.now
            self.poked = Event(self.env)
            waits: list[Event] = [self.poked]
            if self.running:
                waits.append(self.env.timeout(min(job.left for job in self.running.values()) / rate))
            yield self.env.any_of(waits)
            for worker, job in list(self.running.items()):
                job.left -= (self.env.now - began) * rate
                if job.left == 0:
                    self.stop(worker)
                    job.ended.succeed()

    def choose(self, worker: int) -> None:
        own = [job for job in self.waiting if job.name[0] == worker]
        first = min(own, key=lambda job: (job.background, job.rank))
        current = self.running.get(worker)
        if current is not None:
            if not current.background or first.background:
                return
            self.stop(worker)
            self.waiting.append(current)
        self.waiting.remove(first)
        self.running[worker] = first
        first.since = self.env.now

    def stop(self, worker: int) -> None:
        job = self.running.pop(worker)
        if self.env.now > job.since:
            self.rows.append((*job.name, job.since, self.env.now))


class Simulation:
    def __init__(self, schedule: Any, costs: Any, hardware: Any, work: Any) -> None:
        self.env = simpy.Environment()
        self.schedule, self.costs, self.hardware, self.work = schedule, costs, hardware, work
        self.rows: list[Row] = []
        self.up = Direction(self.env, hardware.upload, hardware.host_upload, self.rows)
        self.down = Direction(self.env, hardware.download, hardware.host_download, self.rows)
        self.all_tasks = {task for tasks in schedule.workers for task in tasks}
        self.events: dict[Any, Event] = {}
        size = work.num_microbatches
        blocks = np.array_split(np.arange(size), work.num_blocks)
        self.block_lasts = {int(block[0]): int(block[-1]) for block in blocks}
        self.trains = any(kind in "XBW" for _, kind, _ in self.all_tasks)

    def event(self, *name: Any) -> Event:
        return self.events.setdefault(name, Event(self.env))

    def run(self) -> list[Row]:
        for direction in (self.up, self.down):
            self.env.process(direction.serve())
        pending = []
        for worker, tasks in enumerate(self.schedule.workers):
            stretches = [list(own) for _, own in groupby(tasks, self.slot_of_run)]
            pending.append(self.env.process(self.work_off(worker, tasks, stretches)))
            for rank, own in enumerate(stretches):
                self.move_run(worker, rank, stretches, own)
            for rank, task in enumerate(tasks):
                self.move_activations(worker, rank, tasks, task)
        if self.trains:
            for iteration in range(self.work.num_iterations):
                self.env.process(self.update(iteration))
        self.env.run()
        assert all(process.triggered for process in pending), "a worker waits for ever"
        return sorted(self.rows)

    # what happens

    def work_off(self, worker: int, tasks: Any, stretches: list[Any]) -> Process:
        run_of = {task: rank for rank, own in enumerate(stretches) for task in own}
        for task in tasks:
            needed = [self.event("input", task), self.event("parameters", worker, run_of[task])]
            yield self.env.all_of(needed + [self.event("computed", other) for other in self.ordered_before(task)])
            self.event("started", task).succeed()
            start = self.env.now
            yield self.env.timeout(self.costs[task.kind, task.stage].time)
            self.rows.append((worker, "compute", str(task), start, self.env.now))
            self.event("computed", task).succeed()

    def update(self, iteration: int) -> Process:
        needed = [event for name, event in self.events.items() if name[0] == "gradients" and name[3] == iteration]
        needed += [self.event("computed", task) for task in self.all_tasks if self.iteration(task) == iteration]
        if iteration:
            needed.append(self.event("updated", iteration - 1))
        yield self.env.all_of(needed)
        start = self.env.now
        yield self.env.timeout(self.hardware.update)
        kind, stage = self.work.slots[-1]
        last = (iteration + 1) * self.work.num_microbatches - 1
        name = next(f"{stage}{part}{last}" for part in ("W", kind) if (stage, part, last) in self.all_tasks)
        self.rows.append((-1, "update", name, start, self.env.now))
        self.event("updated", iteration).succeed()

    def transfer(self, direction: Direction, job: Job, needed: Iterable[Event], arrived: Event) -> Process:
        yield self.env.all_of(list(needed))
        if job.left:
            if min(direction.link_rate, direction.host_rate) < math.inf:
                direction.ask(job)
                yield job.ended
            yield self.env.timeout(self.hardware.latency)
        arrived.succeed()

    def move_activations(self, worker: int, rank: int, tasks: Any, task: Any) -> None:
        cost = self.costs[task.kind, task.stage]
        needed = [self.event("output", other) for other in self.read_by(task)]
        if rank >= self.hardware.prefetch:
            needed.append(self.event("started", tasks[rank - self.hardware.prefetch]))
        job = Job((worker, "activation_upload", str(task)), False, rank, cost.input_bytes, Event(self.env))
        self.env.process(self.transfer(self.up, job, needed, self.event("input", task)))
        job = Job((worker, "activation_download", str(task)), False, rank, cost.output_bytes, Event(self.env))
        needed = [self.event("computed", task)]
        self.env.process(self.transfer(self.down, job, needed, self.event("output", task)))

    def move_run(self, worker: int, rank: int, stretches: list[Any], own: Any) -> None:
        costs = [self.costs[task.kind, task.stage] for task in own]
        iteration = self.iteration(own[0])
        needed = []
        if rank >= self.hardware.prefetch_runs:
            needed.append(self.event("started", stretches[rank - self.hardware.prefetch_runs][0]))
        if self.trains and iteration > self.work.staleness:
            needed.append(self.event("updated", iteration - 1 - self.work.staleness))
        size = max(cost.parameter_bytes for cost in costs)
        job = Job((worker, "parameter_upload", str(own[0])), True, rank, size, Event(self.env))
        self.env.process(self.transfer(self.up, job, needed, self.event("parameters", worker, rank)))
        size = max(cost.gradient_bytes for cost in costs)
        job = Job((worker, "gradient_download", str(own[-1])), True, rank, size, Event(self.env))
        arrived = self.event("gradients", worker, rank, iteration)
        self.env.process(self.transfer(self.down, job, [self.event("computed", own[-1])], arrived))

    # what needs what

    def iteration(self, task: Any) -> int:
        return int(task.microbatch // self.work.num_microbatches)

    def slot_of_run(self, task: Any) -> Any:
        return task.stage, {"I": "B", "W": "B"}.get(task.kind, task.kind), self.iteration(task)

    def read_by(self, task: Any) -> list[Any]:
        """Tasks whose outputs a task reads: those of the slot before, as it was done for its microbatch."""
        stage, kind, microbatch = task
        slots = list(self.work.slots)
        place = slots.index(("B" if kind in "IW" else kind, stage))
        if place == 0:
            return []
        before = {
            (stage, part, microbatch) for kind, stage in slots[place - 1 : place] for part in kind.replace("B", "BI")
        }
        return [task for task in self.all_tasks if task in before]

    def ordered_before(self, task: Any) -> list[Any]:
        """Tasks that only have to be computed before: W's I, and the the sum before in a block's buffer."""
        stage, kind, microbatch = task
        found = {(stage, "I", microbatch)} if kind == "W" else set()
        iteration, place = divmod(microbatch, self.work.num_microbatches)
        before = microbatch - 1
        if place in self.block_lasts:
            before = (iteration - 1) * self.work.num_microbatches + self.block_lasts[place]
        if kind in "XBW":
            found |= {(stage, part, before) for part in ("X" if kind == "X" else "BW")}
        return [task for task in self.all_tasks if task in found]
