"""What a task waits for: the one rule that validation, simulation and execution share."""

from __future__ import annotations

from rpfunc.plan.plan import Plan
from rpfunc.schedule.task import Task


def dependencies(plan: Plan, task: Task) -> list[Task]:
    """Returns the tasks that must have ended before `task` may start.

    A forward or fused task needs the stage before it. A backward task needs the stage that hands it its cotangent,
    which ran after every forward. Tasks that write gradients also follow the same stage's task of the microbatch
    before, since sums run in microbatch order (so that no schedule changes a bit).
    """
    stage, kind, microbatch = task
    slots = plan.slots
    place = slots.index((kind, stage))
    needed = []
    if place > 0:
        before_kind, before_stage = slots[place - 1]
        needed.append(Task(before_stage, before_kind, microbatch))
    if kind != "F" and microbatch > 0:
        needed.append(Task(stage, kind, microbatch - 1))
    return needed
