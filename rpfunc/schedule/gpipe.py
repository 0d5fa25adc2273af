"""GPipe: all forward passes, then all backward passes."""

from __future__ import annotations

from operator import eq

from rpfunc.schedule.building import every_iteration, stages_bound
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Workload


def gpipe(work: Workload, num_workers: int) -> Schedule:
    """Returns the schedule in which worker n has stage n, forward for all microbatches, then backward for all.

    Backward passes go in microbatch order too, in which gradients are summed. A worker holds the activations of all
    microbatches at once. Raises ScheduleError unless the plan has no fused stage and one stage for each worker.
    Source: GPipe (arXiv 1811.06965), section 2.3.

    >>> print(gpipe(Workload([("F", 0), ("F", 1), ("B", 1), ("B", 0)], num_microbatches=2), num_workers=2))
    0F0 0F1 0B0 0B1
    1F0 1F1 1B0 1B1
    """
    stages = range(stages_bound("gpipe", work, num_workers, "one forward stage for each worker", eq))
    microbatches = range(work.num_microbatches)
    return every_iteration([[Task(stage, kind, m) for kind in "FB" for m in microbatches] for stage in stages], work)
