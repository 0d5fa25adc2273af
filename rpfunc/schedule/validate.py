"""Checking a schedule: every task once, and an order that ends."""

from __future__ import annotations

from collections import Counter

from rpfunc.errors import ScheduleError
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Workload


def validate(schedule: Schedule, work: Workload) -> None:
    """Raises ScheduleError listing every missing, repeated and unknown task, or where all workers wait for ever.

    The second check runs the schedule without work: each worker ends its next task once what that waits for has ended.
    Cost: O(tasks * workers).
    """
    wanted = set(work.tasks)
    counts = Counter(schedule.tasks)
    problems = [f"{task} is missing" for task in sorted(wanted - counts.keys())]
    problems += [f"{task} is not part of the work" for task in counts if task not in wanted]
    problems += [f"{task} stands {count} times" for task, count in counts.items() if count > 1]
    if problems:
        raise ScheduleError.listing("schedule", problems)
    stuck = _run(schedule, work)
    if stuck:
        waits = [
            f"worker {worker} waits at {task} for {', '.join(map(str, missing))}"
            for worker, (task, missing) in stuck.items()
        ]
        raise ScheduleError.listing(
            f"schedule never ends\n{_grid(schedule, {w: t for w, (t, _) in stuck.items()})}", waits
        )


def _run(schedule: Schedule, work: Workload) -> dict[int, tuple[Task, list[Task]]]:
    """Returns for each worker that cannot go on its next task and what that waits for; empty if all end."""
    ended: set[Task] = set()
    places = [0] * len(schedule.workers)
    moved = True
    while moved:
        moved = False
        for worker, tasks in enumerate(schedule.workers):
            while places[worker] < len(tasks) and ended.issuperset(work.dependencies(tasks[places[worker]])):
                ended.add(tasks[places[worker]])
                places[worker] += 1
                moved = True
    return {
        worker: (tasks[place], [task for task in work.dependencies(tasks[place]) if task not in ended])
        for worker, (tasks, place) in enumerate(zip(schedule.workers, places, strict=True))
        if place < len(tasks)
    }


def _grid(schedule: Schedule, stuck: dict[int, Task]) -> str:
    return "\n".join(
        " ".join(f">{task}<" if task == stuck.get(worker) else str(task) for task in tasks)
        for worker, tasks in enumerate(schedule.workers)
    )
