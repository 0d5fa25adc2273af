"""The optimizer's updates of a workload, one an iteration: what they wait for, what waits for them, what names them."""

from __future__ import annotations

from collections import defaultdict

from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Workload


def gradient_tasks(schedule: Schedule, work: Workload) -> list[list[Task]]:
    """Returns for each update the tasks whose gradients it needs; no update at all if no task has gradients."""
    gradients = defaultdict(list)
    for task in schedule.tasks:
        if task.kind in "XBW":
            gradients[task.microbatch // work.num_microbatches].append(task)
    return [gradients[iteration] for iteration in range(work.num_iterations)] if gradients else []


def update_read(work: Workload, iteration: int) -> int | None:
    """Returns the update that must have ended before an iteration reads parameters; None for none."""
    kind, stage = work.slots[0]
    return work.awaited_update(Task(stage, kind, iteration * work.num_microbatches))


def update_task(work: Workload, iteration: int) -> Task:
    """Returns the task that names an update in a timeline: the last of the iteration's last microbatch."""
    kind, stage = work.slots[-1]
    microbatch = (iteration + 1) * work.num_microbatches - 1
    halved = kind == "B" and (stage, microbatch) in work.halved
    return Task(stage, "W" if halved else kind, microbatch)
