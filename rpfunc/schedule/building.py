"""What generators are built from: runs of microbatches, checks, and one iteration's orders for all iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from rpfunc.checks import count_problems
from rpfunc.errors import ScheduleError
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Slot, Workload

MOST_WORKERS = 10**5
"""Workers that a generator deals to: more is a mistake."""


def even_runs(count: int, num_runs: int) -> list[range]:
    """Returns 0 to `count` - 1 as runs whose sizes differ by at most one, larger first.

    >>> even_runs(5, 2)
    [range(0, 3), range(3, 5)]
    """
    size, larger = divmod(count, num_runs)
    return [
        range(start, stop) for start, stop in pairwise(run * size + min(run, larger) for run in range(num_runs + 1))
    ]


def num_rounds(num_microbatches: int, round_size: int) -> int:
    """Returns into how many rounds of at least `round_size` microbatches an iteration is divided, at least one."""
    return max(1, num_microbatches // round_size)


def run_of(work: Workload, slot: Slot, microbatches: Iterable[int]) -> list[Task]:
    """Returns a slot's tasks for some microbatches: I and W, one after the other, where the workload halves B."""
    kind, stage = slot
    if kind == "B" and work.halved:
        return [Task(stage, part, m) for m in microbatches for part in ("IW" if (stage, m) in work.halved else "B")]
    return [Task(stage, kind, m) for m in microbatches]


def every_iteration(orders: Iterable[Sequence[Task]], work: Workload) -> Schedule:
    """Returns the schedule in which each worker repeats its order of the first iteration in all iterations."""
    return Schedule(
        tuple(
            tuple(
                part
                for iteration in range(work.num_iterations)
                for stage, kind, m in order
                for part in run_of(work, (kind, stage), [iteration * work.num_microbatches + m])
            )
            for order in orders
        )
    )


def check_size(generator: str, work: Workload, num_workers: int) -> None:
    """Raises ScheduleError unless there is a worker, and no more workers and tasks than can be meant."""
    work.check_size(generator, count_problems({"num_workers": num_workers}, most=MOST_WORKERS))


def stages_bound(
    generator: str, work: Workload, num_workers: int, need: str = "", fits: Callable[[int, int], bool] = lambda *_: True
) -> int:
    """Returns the number of forward stages of a workload whose backward stages are the same, in a classic pipeline.

    `fits(num_stages, num_workers)` says which numbers are right, `need` the same in words. Raises ScheduleError for
    other workloads and numbers.
    """
    check_size(generator, work, num_workers)
    num_stages = sum(kind == "F" for kind, _ in work.slots)
    forward = [("F", stage) for stage in range(num_stages)]
    problems = []
    if list(work.slots) != forward + [("B", stage) for _, stage in reversed(forward)]:
        found = " ".join(f"{stage}{kind}" for kind, stage in work.slots)
        problems.append(
            "needs forward stages and the same stages backward, none fused, as Plan.symmetric has them; "
            f"found {found:.60}"
        )
    if not fits(num_stages, num_workers):
        near = (stages for stages in range(1, 2 * (num_stages + num_workers)) if fits(stages, num_workers))
        would_do = [f"a plan with {min(near, key=lambda stages: abs(stages - num_stages))}"]
        would_do += [f"num_workers={n}" for n in range(1, num_stages + 1) if fits(num_stages, n)][-1:]
        problems.append(f"needs {need}, found {num_stages} for {num_workers}; {' or '.join(would_do)} would do")
    if problems:
        raise ScheduleError.listing(generator, problems)
    return num_stages
