"""The round-robin schedule: slots dealt to workers like cards."""

from __future__ import annotations

from rpfunc.errors import ScheduleError
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Workload


def round_robin(work: Workload, num_workers: int, start: int = 0) -> Schedule:
    """Returns the schedule in which slot s goes to worker (start + s) mod num_workers, with all its microbatches.

    The plan's forward, fused and backward stages form one sequence of slots. Further iterations continue the deal, so
    that they join without a gap; the cursor is never reset: after this schedule it stands at
    start + len(work.slots) * work.num_iterations.
    Source: RoundPipe (arXiv 2604.27085), round-robin dispatch. Raises ScheduleError for no worker.

    >>> print(round_robin(Workload([("F", 0), ("X", 1), ("B", 1), ("B", 0)], num_microbatches=2), num_workers=2))
    0F0 0F1 1B0 1B1
    1X0 1X1 0B0 0B1
    """
    if num_workers < 1:
        raise ScheduleError(f"round_robin: num_workers is {num_workers}, it must be at least 1")
    workers: list[list[Task]] = [[] for _ in range(num_workers)]
    slots = [(iteration, slot) for iteration in range(work.num_iterations) for slot in work.slots]
    for card, (iteration, (kind, stage)) in enumerate(slots):
        first = iteration * work.num_microbatches
        dealt = workers[(start + card) % num_workers]
        dealt.extend(Task(stage, kind, m) for m in range(first, first + work.num_microbatches))
    return Schedule(tuple(map(tuple, workers)))
