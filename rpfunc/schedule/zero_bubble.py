"""Zero-bubble schedules: backward passes in two tasks, of which the weight gradients fill what would be idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import eq

from rpfunc.schedule.building import every_iteration, stages_bound
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Slot, Workload


def zb_h1(work: Workload, num_workers: int) -> Schedule:
    """Returns the schedule in which worker n has stage n, and weight gradients (W) go where it would be idle.

    Worker n runs N - n forward passes, then F and I in turn until N are under way, then each W as soon as it needs its
    place. A third of the bubble of `one_f_one_b` where F, I and W take equal times, with the activations of at most N
    microbatches on a worker. It fulfils `halve(work)`. Any number of microbatches will do; with fewer than N, those of
    N that are not there are left out. Raises ScheduleError unless the plan has no fused stage and one stage for each
    worker. Source: ZB-H1 of zero-bubble pipelines (arXiv 2401.10241), section 2.

    >>> print(zb_h1(Workload([("F", 0), ("F", 1), ("B", 1), ("B", 0)], num_microbatches=3), num_workers=2))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    stages_bound("zb_h1", work, num_workers, "one forward stage for each worker", eq)
    steady = work.num_microbatches - num_workers
    orders = []
    for n in range(num_workers):
        forward, first, last = ("F", n), ("I", n), ("W", n)
        fill = [(num_workers - n, [forward]), (n, [first, forward])]
        drain = [(num_workers - n, [first, last]), (n, [last])]
        orders.append(_numbered([*fill, (steady, [first, last, forward]), *drain], work.num_microbatches))
    return every_iteration(orders, work)


def zb_v(work: Workload, num_workers: int) -> Schedule:
    """Returns the schedule in which worker n has stages n and 2N - 1 - n: down the workers and back, as a V.

    Worker n fills with 2(N - n) - 1 forward passes of its first stage, then both stages' in turn, then whole passes of
    its last stage, I and W with them. From then on its stages take turns with F, I and W of a microbatch each. While
    it drains, input gradients go first. No bubble but for N - 1 tasks while the pipeline fills, where F, I and W take
    equal times and there are at least 2N - 1 microbatches; with fewer, those of 2N - 1 that are not there are left out.
    Activations as in `one_f_one_b`: of at most 2N stages and microbatches on a worker, each half as large. It fulfils
    `halve(work)`. Raises ScheduleError unless the plan has no fused stage and two stages for each worker.
    Source: ZB-V of zero-bubble pipelines (arXiv 2401.10241), section 6; the V also in arXiv 2405.15362.

    >>> slots = [("F", 0), ("F", 1), ("F", 2), ("F", 3), ("B", 3), ("B", 2), ("B", 1), ("B", 0)]
    >>> print(zb_v(Workload(slots, num_microbatches=3), num_workers=2))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    stages_bound(
        "zb_v", work, num_workers, "two forward stages for each worker", lambda stages, workers: stages == 2 * workers
    )
    steady = max(work.num_microbatches, 2 * num_workers - 1) - num_workers
    orders = []
    for n in range(num_workers):
        down, back = ([(kind, stage) for kind in "FIW"] for stage in (n, 2 * num_workers - 1 - n))
        after = num_workers - n
        fill = [(2 * after - 1, down[:1]), (n, [back[0], down[0]]), (after, back)]
        drain = [(n, [down[1], back[1]]), (after, down[1:]), (n, back[2:]), (n, down[2:])]
        orders.append(_numbered([*fill, (steady, down + back), *drain], work.num_microbatches))
    return every_iteration(orders, work)


def halve(work: Workload) -> Workload:
    """Returns the workload in which every backward pass is done in two tasks, I and W, as zero-bubble schedules do.

    Raises ScheduleError for more tasks than can be meant.

    >>> print(*halve(Workload([("F", 0), ("B", 0)], num_microbatches=1)).tasks)
    0F0 0I0 0W0
    """
    work.check_size("halve")
    backward = [stage for kind, stage in work.slots if kind == "B"]
    return replace(work, halved=frozenset((stage, m) for stage in backward for m in work.all_microbatches))


def _numbered(repeated: Iterable[tuple[int, Sequence[Slot]]], num_microbatches: int) -> list[Task]:
    """Returns the tasks whose kinds and stages these are, so many times, each kind of a stage from microbatch 0 on.

    What goes beyond the last microbatch is left out.
    """
    count = Counter[Slot]()
    order = []
    for times, steps in repeated:
        for kind, stage in [*steps] * min(times, num_microbatches):
            if count[kind, stage] < num_microbatches:
                order.append(Task(stage, kind, count[kind, stage]))
            count[kind, stage] += 1
    return order
