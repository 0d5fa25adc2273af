"""1F1B: one forward pass, one backward pass, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq

from rpfunc.schedule.building import every_iteration, stages_bound
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Workload


def one_f_one_b(work: Workload, num_workers: int) -> Schedule:
    """Returns the schedule in which worker n has stage n and starts a backward pass as soon as there is one.

    As fast as `gpipe`, with the activations of at most num_workers - n microbatches on worker n. Any number of
    microbatches will do. Raises ScheduleError unless the plan has no fused stage and one stage for each worker.
    Source: PipeDream-Flush (arXiv 2006.09503), as in Megatron-LM (arXiv 2104.04473), section 2.2.1.

    >>> print(one_f_one_b(Workload([("F", 0), ("F", 1), ("B", 1), ("B", 0)], num_microbatches=3), num_workers=2))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    stages = range(stages_bound("one_f_one_b", work, num_workers, "one forward stage for each worker", eq))
    forward, backward = ([[Task(s, kind, m) for m in range(work.num_microbatches)] for s in stages] for kind in "FB")
    return every_iteration(
        [in_turn(forward[stage], backward[stage], warm_up=num_workers - 1 - stage) for stage in stages], work
    )


def in_turn(forward: Sequence[Task], backward: Sequence[Task], warm_up: int) -> list[Task]:
    """Returns `warm_up` forward tasks, then one forward and one backward in turn, then what is left of the backward."""
    ahead = min(warm_up, len(forward))
    paired = zip(forward[ahead:], backward, strict=False)
    return [*forward[:ahead], *(task for pair in paired for task in pair), *backward[len(forward) - ahead :]]
