"""Interleaved 1F1B: several stages a worker, microbatches in groups, so that the pipeline fills sooner."""

from __future__ import annotations

from rpfunc.schedule.building import even_runs, every_iteration, num_rounds, stages_bound
from rpfunc.schedule.one_f_one_b import in_turn
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Workload


def interleaved(work: Workload, num_workers: int) -> Schedule:
    """Returns the schedule in which worker n has stages n, n + N, n + 2N, ... and runs them as `one_f_one_b` does.

    Microbatches go in groups: each passes all of a worker's stages before the next begins. Megatron-LM wants their
    number to be a multiple of N, so that a group has N; here any number will do, in even groups of at least N (one
    group, if there are fewer). Forward passes run further ahead than in `one_f_one_b`, which costs memory. Raises
    ScheduleError unless the plan has no fused stage and as many stages for each worker.
    Source: Megatron-LM (arXiv 2104.04473), section 2.2.2; groups of other sizes than N: own.

    >>> slots = [("F", 0), ("F", 1), ("F", 2), ("F", 3), ("B", 3), ("B", 2), ("B", 1), ("B", 0)]
    >>> print(interleaved(Workload(slots, num_microbatches=2), num_workers=2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    num_stages = stages_bound(
        "interleaved",
        work,
        num_workers,
        "as many forward stages for each worker",
        lambda stages, workers: stages % workers == 0,
    )
    groups = even_runs(work.num_microbatches, num_rounds(work.num_microbatches, num_workers))
    orders = []
    for worker in range(num_workers):
        stages = range(worker, num_stages, num_workers)
        forward = [Task(stage, "F", m) for group in groups for stage in stages for m in group]
        backward = [Task(stage, "B", m) for group in groups for stage in reversed(stages) for m in group]
        # the first backward pass is that of the last stage: a group passes all stages before, and it comes back
        warm_up = (len(stages) - 1) * len(groups[0]) + 2 * (num_workers - 1 - worker)
        orders.append(in_turn(forward, backward, warm_up))
    return every_iteration(orders, work)
