"""The tasks of a workload that a schedule lacks, told as runs, and where one should look."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import pairwise

from rpfunc.schedule.grid import Fault, Faults, Place
from rpfunc.schedule.task import Task
from rpfunc.schedule.workload import Slot, Workload


def missing_faults(work: Workload, found: Mapping[Task, Place]) -> Faults:
    """Returns which tasks are not among those found, one fault for microbatches that follow each other.

    Cost: O(tasks found log tasks found), however many are missing: a wrong number may ask for more than memory holds.
    """
    return Faults.of(_missing(work, found), lambda run: _fault(work, found, *run))


def slot_of(task: Task) -> Slot:
    """Returns the slot that a task belongs to: I and W are parts of B."""
    return "B" if task.kind in "IW" else task.kind, task.stage


def _missing(work: Workload, found: Collection[Task]) -> list[tuple[Task, Task]]:
    """Returns the first and the last task of each run."""
    present, halved = defaultdict[tuple[str, int], set[int]](set), defaultdict[int, set[int]](set)
    for stage, kind, m in found:
        present[kind, stage].add(m)
    for stage, m in work.halved:
        if m in work.all_microbatches:
            halved[stage].add(m)
    runs: list[tuple[str, int, range]] = []
    for kind, stage in work.slots:
        in_two = halved[stage] if kind == "B" else set()
        runs += [(kind, stage, run) for run in _gaps(present[kind, stage] | in_two, work.all_microbatches.stop)]
        runs += [(half, stage, run) for half in "IW" for run in _runs(in_two - present[half, stage])]
    return [(Task(stage, kind, run.start), Task(stage, kind, run.stop - 1)) for kind, stage, run in runs]


def _gaps(numbers: Collection[int], stop: int) -> list[range]:
    """Returns the runs of 0 to `stop` - 1 that are not among the numbers."""
    edges = [-1, *sorted(number for number in numbers if number < stop), stop]
    return [range(before + 1, after) for before, after in pairwise(edges) if after > before + 1]


def _runs(numbers: Collection[int]) -> list[range]:
    """Returns the runs of numbers that follow each other."""
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    stops = sorted(number + 1 for number in numbers if number + 1 not in numbers)
    return list(map(range, starts, stops))


def _fault(work: Workload, found: Mapping[Task, Place], first: Task, last: Task) -> Fault:
    stage, kind, m = first
    other = Task(stage, {"I": "W", "W": "I"}.get(kind, kind), m)
    text = f"{first} is missing" if first == last else f"{first} to {last} are missing"
    text += f", the other half of {other}" if first == last and other in found else ""
    beside = [Task(stage, kind, m - 1), Task(stage, kind, last.microbatch + 1)]
    following = work.slots[list(work.slots).index(slot_of(first)) + 1 :][:1]
    handed = [Task(after, part, m) for slot, after in following for part in ("BI" if slot == "B" else slot)]
    # arrows where it might stand: at its other half, at its neighbours, after what it needs, before what needs it
    nearest = (
        [found[task] for task in near if task in found] for near in ([other], beside, work.dependencies(first), handed)
    )
    return Fault(text, next(filter(None, nearest), []))
