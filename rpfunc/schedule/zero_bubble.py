"""Zero-bubble schedules: backward passes in two tasks, of which the weight gradients fill what would be idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import eq

from rpfunc.schedule.building import every_iteration, stages_bound
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Workload


def zb_h1(work: Workload, num_workers: int) -> Schedule:
    """Returns the schedule in which worker n has stage n, and weight gradients (W) wait until there is nothing else.

    A third of the bubble of `one_f_one_b` where F, I and W take equal times, with the activations of at most
    num_workers microbatches on a worker. It fulfils `halve(work)`. Any number of microbatches will do. Raises
    ScheduleError unless the plan has no fused stage and one stage for each worker.
    Source: ZB-H1 of zero-bubble pipelines (arXiv 2401.10241), section 2; the rule that builds it: own.

    >>> print(zb_h1(Workload([("F", 0), ("F", 1), ("B", 1), ("B", 0)], num_microbatches=3), num_workers=2))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    stages_bound("zb_h1", work, num_workers, "one forward stage for each worker", eq)
    return every_iteration(_orders([(n,) for n in range(num_workers)], work.num_microbatches), work)


def zb_v(work: Workload, num_workers: int) -> Schedule:
    """Returns the schedule in which worker n has stages n and 2N - 1 - n: down the workers and back, as a V.

    No bubble but for N - 1 tasks while the pipeline fills, where F, I and W take equal times and there are at least
    2N - 1 microbatches; any number will do. Activations as in `one_f_one_b`: of at most 2N stages and microbatches on a
    worker, each half as large. It fulfils `halve(work)`. Raises ScheduleError unless the plan has no fused stage and
    two stages for each worker.
    Source: ZB-V of zero-bubble pipelines (arXiv 2401.10241), section 6; the rule that builds it: own.

    >>> slots = [("F", 0), ("F", 1), ("F", 2), ("F", 3), ("B", 3), ("B", 2), ("B", 1), ("B", 0)]
    >>> print(zb_v(Workload(slots, num_microbatches=2), num_workers=2))
    0F0 0F1 3F0 3I0 3F1 3I1 0I0 0W0 3W0 0I1 0W1 3W1
    1F0 2F0 1F1 2F1 2I0 1I0 1W0 2I1 1I1 1W1 2W0 2W1
    """
    stages_bound(
        "zb_v", work, num_workers, "two forward stages for each worker", lambda stages, workers: stages == 2 * workers
    )
    pairs = [(n, 2 * num_workers - 1 - n) for n in range(num_workers)]
    return every_iteration(_orders(pairs, work.num_microbatches), work)


def halve(work: Workload) -> Workload:
    """Returns the workload in which every backward pass is done in two tasks, I and W, as zero-bubble schedules do.

    >>> print(*halve(Workload([("F", 0), ("B", 0)], num_microbatches=1)).tasks)
    0F0 0I0 0W0
    """
    backward = [stage for kind, stage in work.slots if kind == "B"]
    return replace(work, halved=frozenset((stage, m) for stage in backward for m in work.all_microbatches))


def _orders(placement: Sequence[Sequence[int]], num_microbatches: int) -> list[list[Task]]:
    """Returns each worker's order, given the stages of each worker, when every task takes one step.

    In each step a worker runs the first of these that is ready: a forward pass, of its later stage first; I, then W, of
    its earlier stage; the same of its later stage. So microbatches that are nearly through come first. Two limits keep
    forward passes back: a worker holds as many activations as there are stages (from F to W), and stage s has at most
    num_stages - s between F and I, as in 1F1B; where workers have two stages, the first one leaves a place for the
    last. So the oldest microbatch can always go on, and the rule ends.
    """
    num_stages = sum(map(len, placement))
    reserved = len(placement[0]) - 1
    done = {kind: [0] * num_stages for kind in "FIW"}  # how many microbatches each stage has passed

    def ready(kind: str, stage: int) -> bool:
        if kind == "F":
            arrived = num_microbatches if stage == 0 else done["F"][stage - 1]
            held = sum(done["F"][own] - done["W"][own] for own in placement_of[stage])
            depth = done["F"][stage] - done["I"][stage]
            if held == num_stages or depth >= num_stages - max(stage, reserved):
                return False
        elif kind == "I":
            arrived = done["F"][stage] if stage == num_stages - 1 else done["I"][stage + 1]
        else:
            arrived = done["I"][stage]
        return done[kind][stage] < arrived

    placement_of = {stage: stages for stages in placement for stage in stages}
    preferences = [
        [("F", stage) for stage in reversed(stages)] + [(kind, stage) for stage in stages for kind in "IW"]
        for stages in placement
    ]
    orders: list[list[Task]] = [[] for _ in placement]
    while any(step := [next((choice for choice in choices if ready(*choice)), None) for choices in preferences]):
        for order, choice in zip(orders, step, strict=True):
            if choice is not None:
                kind, stage = choice
                order.append(Task(stage, kind, done[kind][stage]))
                done[kind][stage] += 1
    return orders
