"""Whether an order of tasks can be run: no task before one that it needs, and no workers that wait in a cycle."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from rpfunc.schedule.grid import Fault, Faults, Place
from rpfunc.schedule.task import Task
from rpfunc.schedule.workload import Workload

MOST_LINKS = 8
"""Waits of a cycle that an error spells out."""

MOST_STARTS = 32
"""Members of a cycle through which a shorter one is sought: a bound, so that time stays linear."""


class Update(NamedTuple):
    """The optimizer's update after an iteration: it needs the update before and all gradients of the iteration."""

    iteration: int

    def __str__(self) -> str:
        return f"the update of iteration {self.iteration}"


Need = Task | Update
Waiter = int | Update
"""A worker, by its number, or an update."""


@dataclass(frozen=True)
class Standing:
    """Where the tasks of a workload stand; some may be missing, none is there twice.

    lines    each worker's tasks, in order
    indices  where each task is in them: worker and index
    places   of each entry of the lines in the schedule, whose lists may have other tasks between them
    """

    work: Workload
    lines: Sequence[Sequence[Task]]
    indices: Mapping[Task, tuple[int, int]]
    places: Sequence[Sequence[int]]

    def place(self, task: Task) -> Place:
        """Returns where a task stands in the schedule."""
        worker, index = self.indices[task]
        return worker, self.places[worker][index]


def order_faults(standing: Standing) -> tuple[Faults, Faults]:
    """Returns each task that stands before one that it needs on its worker, and workers that wait in a cycle.

    Runs the tasks without work: each worker ends its next task once what that needs on other workers has ended. What
    stands later on the worker itself is the first kind of fault, and nothing waits for it; whoever waits for ever in
    spite of that is in a cycle or behind one. Cost: O(tasks). Source: own.
    """
    hasty = _hasty(standing)
    run = _run(standing, hasty)
    early = [found for worker in sorted(run.odd | run.unmet.keys()) for found in _early(standing, hasty, worker)]
    heads = {worker: standing.lines[worker][run.ended[worker]] for worker in run.unmet}
    waits = _waits(standing, run)
    return (
        Faults.of(early, lambda found: _early_fault(standing, found)),
        Faults.of(_cycles(waits), lambda cycle: _cycle_fault(standing, heads, waits, cycle)),
    )


def _hasty(standing: Standing) -> dict[Task, Task]:
    """Returns tasks that await an update, each with one that the update needs and that follows on the same worker."""
    work = standing.work
    found: dict[Task, Task] = {}
    for line in standing.lines if work.num_iterations > 1 else ():
        oldest: Task | None = None  # of the gradient tasks that follow, the next one of the first iteration
        for task in reversed(line):
            update = work.awaited_update(task)
            if update is not None and oldest is not None and work.iteration(oldest) <= update:
                found[task] = oldest
            if _has_gradient(task) and (oldest is None or work.iteration(task) <= work.iteration(oldest)):
                oldest = task
    return found


@dataclass(frozen=True)
class _Run:
    """How far the tasks went.

    unmet    for each worker that waits for ever what its next task waits for
    ended    how many tasks of each worker ended, which is the index of its next
    odd      workers with a task that did not wait for what stands later on the same worker
    """

    unmet: Mapping[int, Sequence[Need]]
    ended: Sequence[int]
    odd: Set[int]


def _run(standing: Standing, hasty: Collection[Task]) -> _Run:
    work, lines, indices = standing.work, standing.lines, standing.indices
    ended, odd = [0] * len(lines), set[int]()
    gradients = Counter(work.iteration(task) for task in indices if _has_gradient(task))
    updates = deque(sorted(gradients))
    ready, parked = list(range(len(lines))), dict[Need, list[int]]()

    def unmet(worker: int) -> list[Need]:
        task = lines[worker][ended[worker]]
        needs: list[Need] = []
        for need in work.dependencies(task):
            other, index = indices.get(need, (worker, -1))
            if index >= ended[other] and other != worker:
                needs.append(need)
            elif index >= ended[other]:
                odd.add(worker)
        update = work.awaited_update(task)
        if update is not None and updates and update >= updates[0]:
            if task in hasty:
                odd.add(worker)
            else:
                needs.append(Update(updates[0]))  # which those that follow wait for
        return needs

    while ready:
        worker = ready.pop()
        while ended[worker] < len(lines[worker]):
            needs = unmet(worker)
            if needs:
                parked.setdefault(needs[0], []).append(worker)
                break
            task = lines[worker][ended[worker]]
            ended[worker] += 1
            ready += parked.pop(task, ())
            if _has_gradient(task):
                gradients[work.iteration(task)] -= 1
                while updates and not gradients[updates[0]]:
                    ready += parked.pop(Update(updates.popleft()), ())
    stuck = [worker for worker, line in enumerate(lines) if ended[worker] < len(line)]
    return _Run({worker: unmet(worker) for worker in stuck}, ended, odd)


def _has_gradient(task: Task) -> bool:
    return task.kind in "XBW"


class _Early(NamedTuple):
    """`task` stands before `late`, which it needs: itself, or for the update that it awaits."""

    task: Task
    late: Task
    update: int | None


def _early(standing: Standing, hasty: Mapping[Task, Task], worker: int) -> list[_Early]:
    work, indices = standing.work, standing.indices
    found = []
    for index, task in enumerate(standing.lines[worker]):
        for need in work.dependencies(task):
            if indices.get(need, (-1, -1)) > (worker, index) and indices[need][0] == worker:
                found.append(_Early(task, need, None))
        if task in hasty:
            found.append(_Early(task, hasty[task], work.awaited_update(task)))
    return found


def _early_fault(standing: Standing, found: _Early) -> Fault:
    task, late, update = found
    (worker, place), (_, late_place) = places = standing.place(task), standing.place(late)
    if update is not None:
        why = f"{task} awaits {Update(update)}, which needs {late}"
    elif late.stage == task.stage and standing.work.iteration(late) != standing.work.iteration(task):
        why = f"the gradients of iteration {standing.work.iteration(late)} go into the same buffer"
    elif late.stage == task.stage and late.microbatch != task.microbatch:
        why = "gradients are summed in microbatch order"
    else:
        why = f"{task} needs {late}"
    return Fault(f"worker {worker} has {task} (place {place}) before {late} (place {late_place}): {why}", places)


Waits = Mapping[Waiter, Mapping[Waiter, Need]]
"""For each that waits for ever whom it waits for, and for what of theirs."""


def _waits(standing: Standing, run: _Run) -> Waits:
    waits: dict[Waiter, dict[Waiter, Need]] = {
        worker: {need if isinstance(need, Update) else standing.indices[need][0]: need for need in unmet}
        for worker, unmet in run.unmet.items()
    }
    for update in {need for unmet in run.unmet.values() for need in unmet if isinstance(need, Update)}:
        waits[update] = {
            worker: task
            for worker in run.unmet
            for task in reversed(standing.lines[worker][run.ended[worker] :])
            if _has_gradient(task) and standing.work.iteration(task) == update.iteration
        }
    return waits


def _cycles(waits: Waits) -> list[list[Waiter]]:
    """Returns cycles in which each waits for the next, the last for the first.

    Follows from each waiter the first that it waits for, until one was seen before, which finds a cycle in each group;
    then takes the shortest through any of its members.
    """
    seen: set[Waiter] = set()
    cycles: dict[frozenset[Waiter], list[Waiter]] = {}
    for waiter in waits:
        path: dict[Waiter, int] = {}
        while waiter not in seen and waiter not in path:
            path[waiter] = len(path)
            waiter = next(iter(waits[waiter]))
        if waiter in path:
            cycle = list(path)[path[waiter] :]
            if len(cycles) < MOST_STARTS:
                cycle = min((_shortest(waits, start) for start in cycle[:MOST_STARTS]), key=len)
            cycles.setdefault(frozenset(cycle), cycle)
        seen |= path.keys()
    return list(cycles.values())


def _shortest(waits: Waits, start: Waiter) -> list[Waiter]:
    """Returns the shortest cycle from `start`, which is on one."""
    came_from: dict[Waiter, Waiter] = {}
    queue = deque([start])
    while start not in came_from:
        waiter = queue.popleft()
        for target in waits[waiter]:
            if target not in came_from:
                came_from[target] = waiter
                queue.append(target)
    cycle = [came_from[start]]
    while cycle[-1] != start:
        cycle.append(came_from[cycle[-1]])
    return cycle[::-1]


def _cycle_fault(standing: Standing, heads: Mapping[int, Task], waits: Waits, cycle: Sequence[Waiter]) -> Fault:
    links: list[tuple[str, list[Place]]] = []
    for waiter, target in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        need = waits[waiter][target]
        text = f"worker {waiter} waits at {heads[waiter]}" if isinstance(waiter, int) else f"{waiter} waits"
        text += f" for {need}"
        places = []
        if isinstance(target, int) and isinstance(need, Task):
            next_task = heads[target]
            places = [standing.place(need), standing.place(next_task)]
            stands = "comes next" if need == next_task else "stands"
            text += f", which {stands} on worker {target}" + ("" if need == next_task else f" after {next_task}")
        links.append((text, places))
    if len(links) > MOST_LINKS:
        links[MOST_LINKS - 1 : -1] = [(f"and so on over {len(links) - MOST_LINKS} more", [])]
    texts = "; ".join(text for text, _ in links)
    return Fault(f"deadlock: {texts}", [place for _, places in links for place in places])
