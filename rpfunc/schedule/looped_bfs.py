"""Looped, breadth first: each worker runs a stage for all microbatches before its next stage."""

from __future__ import annotations

from rpfunc.schedule.building import every_iteration, stages_bound
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Workload


def looped_bfs(work: Workload, num_workers: int) -> Schedule:
    """Returns the schedule in which worker n has stages n, n + N, n + 2N, ..., each run for all microbatches at once.

    A stage's parameters are needed in one stretch forward and one backward, so that they may live on the host between:
    this is the order of pipelines with CPU offload. Backward passes go in microbatch order, in which gradients are
    summed. Any number of stages will do. Raises ScheduleError unless the plan has no fused stage.
    Source: breadth-first pipeline parallelism (arXiv 2211.05953); with offload, Mobius (ASPLOS 2023,
    doi 10.1145/3575693.3575703).

    >>> slots = [("F", 0), ("F", 1), ("F", 2), ("F", 3), ("B", 3), ("B", 2), ("B", 1), ("B", 0)]
    >>> print(looped_bfs(Workload(slots, num_microbatches=2), num_workers=2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    num_stages = stages_bound("looped_bfs", work, num_workers)
    microbatches = range(work.num_microbatches)
    orders = []
    for worker in range(num_workers):
        stages = range(worker, num_stages, num_workers)
        forward = [Task(stage, "F", m) for stage in stages for m in microbatches]
        backward = [Task(stage, "B", m) for stage in reversed(stages) for m in microbatches]
        orders.append([*forward, *backward])
    return every_iteration(orders, work)
