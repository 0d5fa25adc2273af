"""The round-robin schedule: slots dealt to workers like cards."""

from __future__ import annotations

from rpfunc.errors import ScheduleError
from rpfunc.plan.plan import Plan
from rpfunc.schedule.task import Schedule, Task


def round_robin(plan: Plan, num_workers: int, num_microbatches: int, start: int = 0) -> Schedule:
    """Returns the schedule in which slot s goes to worker (start + s) mod num_workers, with all its microbatches.

    The plan's forward, fused and backward stages form one sequence of slots. The next iteration continues the deal:
    give it start + len(plan.slots), so that iterations join without a gap; the cursor is never reset.
    Source: RoundPipe (arXiv 2604.27085), round-robin dispatch. Raises ScheduleError for numbers below 1.

    >>> print(round_robin(Plan.parse("F0:2 X2:3 B0:1 B1:2"), num_workers=2, num_microbatches=2))
    0F0 0F1 1B0 1B1
    1X0 1X1 0B0 0B1
    """
    if num_workers < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"round_robin: needs at least 1 worker and 1 microbatch, found {num_workers} and {num_microbatches}"
        )
    workers: list[list[Task]] = [[] for _ in range(num_workers)]
    for slot, (kind, stage) in enumerate(plan.slots):
        dealt = workers[(start + slot) % num_workers]
        dealt.extend(Task(stage, kind, microbatch) for microbatch in range(num_microbatches))
    return Schedule(tuple(map(tuple, workers)))
