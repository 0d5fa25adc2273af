"""Checking a schedule: every task once, each after what it needs, and no workers that wait for each other for ever."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rpfunc.checks import count_problems
from rpfunc.errors import ScheduleError
from rpfunc.schedule.grid import Fault, Faults, Place, grid
from rpfunc.schedule.missing import missing_faults, slot_of
from rpfunc.schedule.order import Standing, order_faults
from rpfunc.schedule.task import MOST_SHOWN, Schedule, Task, listing
from rpfunc.schedule.workload import Workload


def validate(schedule: Schedule, work: Workload, *, bound: bool = False, in_flight: int | None = None) -> None:
    """Raises ScheduleError listing all that keeps a schedule from doing the work, with arrows in its grid.

    Tasks that are missing, repeated or no part of the work; tasks that stand before one that they need on their worker;
    deadlocks, in which workers wait for each other in a cycle, maybe by way of an update between iterations. Where the
    work halves no backward pass, the schedule decides: each in one task, B, or in two, I and W (`halved_as` returns
    that work). Workers and places count from 0.

    bound      whether weights stay on a worker: then all tasks of a stage must stand on one
    in_flight  the most activations that a worker may hold: one for a stage and microbatch, from its first task on the
               worker (F, or I where F stands elsewhere) to its last (B or W)

    Both take a stage number for the same layers forward and backward, as `Plan.symmetric` has them.
    Cost: O(tasks), some 8 µs each. Source: own.

    >>> work = Workload([("F", 0), ("B", 0)], num_microbatches=2)
    >>> validate(Schedule.parse("0F0 0F1 0B0 0I1 0W1"), work)
    >>> validate(Schedule.parse("0F0 0B0 0B1 0F1"), work)
    Traceback (most recent call last):
    rpfunc.errors.ScheduleError: schedule: worker 0 has 0B1 (place 2) before 0F1 (place 3): 0B1 needs 0F1
    worker 0:  0F0   0B0  >0B1< >0F1<
    """
    problems = [] if in_flight is None else count_problems({"in_flight": in_flight})
    if problems:
        raise ScheduleError.listing("validate", problems)
    work = halved_as(schedule, work)
    standing, incomplete = _stand(schedule, work)
    kinds = [*incomplete, *order_faults(standing)]
    if bound:
        kinds.append(_spread(standing))
    if in_flight is not None:
        kinds.append(_overfull(standing, in_flight))
    if any(faults.total for faults in kinds):
        error = listing([([fault.text for fault in faults.shown], faults.total) for faults in kinds])
        picture = grid(schedule, {place for faults in kinds for fault in faults.shown for place in fault.places})
        raise ScheduleError(f"{error}\n{picture}".rstrip())


def halved_as(schedule: Schedule, work: Workload) -> Workload:
    """Returns the work with those backward passes halved that the schedule does so, unless it halves some itself.

    >>> sorted(halved_as(Schedule.parse("0X0 0X1"), Workload([("X", 0)], 2)).halved)
    []
    """
    halves = {(stage, m) for stage, kind, m in schedule.tasks if kind in "IW"}
    if work.halved or not halves:
        return work
    return replace(work, halved=frozenset(halves - {(stage, m) for stage, kind, m in schedule.tasks if kind == "B"}))


def _stand(schedule: Schedule, work: Workload) -> tuple[Standing, list[Faults]]:
    """Returns where the work's tasks stand first; and which are missing, repeated, and no part of the work."""
    first: dict[Task, Place] = {}
    again: dict[Task, list[Place]] = {}
    for worker, tasks in enumerate(schedule.workers):
        for index, task in enumerate(tasks):
            here = worker, index
            if first.setdefault(task, here) is not here:
                again.setdefault(task, [first[task]]).append(here)
    part_of = _part_of(work)
    foreign = [task for task in first if not part_of(task)]
    faults = [
        missing_faults(work, first) if len(first) - len(foreign) < work.num_tasks else Faults([], 0),
        Faults.of(list(again), lambda task: Fault(_repeated(task, again[task]), again[task])),
        Faults.of(foreign, lambda task: Fault(_foreign(task, work, first), [first[task]])),
    ]
    if not again and not foreign:
        return Standing(work, schedule.workers, first, [range(len(tasks)) for tasks in schedule.workers]), faults
    places: list[list[int]] = [[] for _ in schedule.workers]
    for task, (worker, index) in first.items():
        if part_of(task):
            places[worker].append(index)
    lines = [[tasks[index] for index in own] for tasks, own in zip(schedule.workers, places, strict=True)]
    indices = {task: (worker, index) for worker, line in enumerate(lines) for index, task in enumerate(line)}
    return Standing(work, lines, indices, places), faults


def _part_of(work: Workload) -> Callable[[Task], bool]:
    """Returns a function that says whether a task is one of the work's."""
    slots, microbatches, halved = set(work.slots), work.all_microbatches, work.halved

    def part_of(task: Task) -> bool:
        stage, kind, m = task
        if m not in microbatches or slot_of(task) not in slots:
            return False
        return kind in "FX" or (kind in "IW") == ((stage, m) in halved)

    return part_of


def _repeated(task: Task, found: Sequence[Place]) -> str:
    where = _few([f"worker {worker} place {place}" for worker, place in found])
    return f"{task} stands {len(found)} times: {where}"


def _foreign(task: Task, work: Workload, found: Collection[Task]) -> str:
    stage, _, m = task
    reasons = []
    if slot_of(task) not in work.slots:
        stages = {kind: [stage for other, stage in work.slots if other == kind] for kind in "FXB"}
        reasons.append("its stages are " + ", ".join(f"{kind} {_numbers(own)}" for kind, own in stages.items() if own))
    if m not in work.all_microbatches:
        reasons.append(f"its last microbatch is {work.all_microbatches[-1]}")
    whole = Task(stage, "B", m)
    if not reasons and whole in found and task != whole:
        return f"{task} stands beside {whole}: a backward pass is one task, B, or two, I and W"
    if not reasons:
        how = f"in halves, {stage}I{m} and {stage}W{m}" if task == whole else f"whole, {whole}"
        reasons.append(f"it has this backward pass {how}")
    return f"{task} is no part of the work: {'; '.join(reasons)}"


def _numbers(numbers: Sequence[int]) -> str:
    numbers = sorted(numbers)
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return _few([str(number) for number in numbers])


def _few(words: Sequence[str]) -> str:
    return ", ".join([*words[:MOST_SHOWN], *(["..."] if len(words) > MOST_SHOWN else [])])


def _spread(standing: Standing) -> Faults:
    """Returns each stage that stands on several workers, with its first task on each."""
    stages: dict[int, dict[int, Task]] = {}
    for task, (worker, _) in standing.indices.items():
        stages.setdefault(task.stage, {}).setdefault(worker, task)

    def fault(stage: int) -> Fault:
        firsts = stages[stage]
        where = _few([f"{task} on worker {worker}" for worker, task in firsts.items()])
        text = f"stage {stage} stands on {len(firsts)} workers, bound weights stay on one: {where}"
        return Fault(text, [standing.place(task) for task in firsts.values()][:MOST_SHOWN])

    return Faults.of([stage for stage in sorted(stages) if len(stages[stage]) > 1], fault)


def _overfull(standing: Standing, in_flight: int) -> Faults:
    """Returns for each worker that holds too many activations the first task at which it does."""
    faults = []
    for worker, tasks in enumerate(standing.lines):
        last = {(stage, m): index for index, (stage, _, m) in enumerate(tasks)}
        held: set[tuple[int, int]] = set()
        over: list[tuple[int, Task]] = []
        for index, task in enumerate(tasks):
            passed = task.stage, task.microbatch
            if last[passed] > index:
                held.add(passed)
                over += [(len(held), task)] if len(held) > in_flight else []
            else:
                held.discard(passed)
        if over:
            (found, task), (most, peak) = over[0], max(over, key=lambda at: at[0])
            later = f", {most} at {peak}" if most > found else ""
            text = f"worker {worker} holds {found} activations at {task}{later}; in_flight is {in_flight}"
            faults.append(Fault(text, [standing.place(task), standing.place(peak)]))
    return Faults.of(faults, lambda fault: fault)
