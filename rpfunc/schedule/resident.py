"""Schedules that keep their stages on a worker: what still has to move between workers and host."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from rpfunc.plan.costs import StageCost, StageCosts
from rpfunc.schedule.task import Schedule, refusal
from rpfunc.schedule.workload import Slot, Workload


def moved_costs(schedule: Schedule, costs: StageCosts, work: Workload) -> dict[Slot, StageCost]:
    r"""Returns the costs with only those bytes that move where each worker keeps what it has.

    - Parameters and gradients stay where their stage is.
    - What a stage has read of a microbatch stays until its last task on it: B's stage input is F's, W reads what I did.
    - What the next slot reads on the same worker is neither downloaded nor uploaded.

    A stage number means the same layers forward and backward, as in `Plan.symmetric`. Raises ScheduleError listing the
    stages for which that cannot be: fused and backward at once, or on several workers. Cost: O(tasks). Source: own.

    >>> costs = {("F", 0): StageCost(1, 9, 0, 5, 7), ("B", 0): StageCost(1, 9, 9, 12, 5), ("X", 1): StageCost(1, 9)}
    >>> schedule = Schedule.parse("0F0 0B0\n1X0")
    >>> moved_costs(schedule, costs, Workload.of(schedule))["B", 0]
    StageCost(time=1, parameter_bytes=0, gradient_bytes=0, input_bytes=7, output_bytes=5, working_bytes=0.0)
    """
    homes = _homes(schedule)
    ran = {(kind, stage) for stage, kind, _ in schedule.tasks}
    before, after = {}, {}
    for one, other in pairwise(work.slots):
        if homes[one[1]] == homes[other[1]]:
            before[other], after[one] = one, other

    def handed_on(slot: Slot) -> float:
        """Returns the bytes that the slot before hands on to this one, on their worker."""
        if slot not in before:
            return 0
        kind, stage = before[slot]
        parts = ran.intersection((part, stage) for part in ("BI" if kind == "B" else kind))
        return min(costs[part].output_bytes for part in parts)

    moved = {}
    for kind, stage in ran:
        cost, slot = costs[kind, stage], ("B" if kind in "IW" else kind, stage)
        moved[kind, stage] = cost._replace(
            parameter_bytes=0,
            gradient_bytes=0,
            input_bytes=max(0, cost.input_bytes - read_before(kind, stage, costs) - handed_on(slot)),
            output_bytes=0 if slot in after and kind != "W" else cost.output_bytes,
        )
    return moved


def read_before(kind: str, stage: int, costs: StageCosts) -> float:
    """Returns the bytes of a task's inputs that its stage has read already, for the same microbatch."""
    earlier = {"B": "F", "I": "F", "W": "FI"}.get(kind, "")
    return max((costs[part, stage].input_bytes for part in earlier if (part, stage) in costs), default=0)


def _homes(schedule: Schedule) -> dict[int, int]:
    """Returns the worker of each stage."""
    workers, kinds = defaultdict(set), defaultdict(set)
    for worker, tasks in enumerate(schedule.workers):
        for stage, kind, _ in tasks:
            workers[stage].add(worker)
            kinds[stage].add(kind)
    problems = [
        f"stage {stage} runs on workers {', '.join(map(str, sorted(own)))}; to be resident it needs one"
        for stage, own in sorted(workers.items())
        if len(own) > 1
    ]
    problems += [
        f"stage {stage} runs as X and as B, which are other layers; to be resident it needs a plan cut alike both ways"
        for stage, own in sorted(kinds.items())
        if "X" in own and len(own) > 1
    ]
    if problems:
        raise refusal(problems)
    return {stage: worker for stage, own in workers.items() for worker in own}
