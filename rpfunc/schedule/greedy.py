"""List scheduling: a free worker takes the ready task with most time still to come after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from rpfunc.errors import ScheduleError
from rpfunc.plan.costs import StageCosts, cost_problems
from rpfunc.schedule.building import check_size
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.workload import Workload

Node = Task | int
"""A task, or the update of an iteration, by its number."""


def greedy(work: Workload, num_workers: int, costs: StageCosts) -> Schedule:
    """Returns the schedule in which no worker is idle while a task is ready, when tasks take the times in `costs`.

    Any worker may run any stage; transfers are not looked at. Of the ready tasks comes first one of the earliest
    iteration, then the one that begins the longest path of tasks that wait for each other. An update takes no time.
    At most 2 - 1/num_workers times as long as the shortest schedule. Cost: O(tasks log tasks), some 25 µs each.
    Source: list scheduling and its bound, Graham 1969 (doi 10.1137/0117039); longest path first. Raises ScheduleError
    for no worker, and listing what has no cost.

    >>> from rpfunc import Plan
    >>> from rpfunc.plan.costs import uniform_costs
    >>> plan = Plan.parse("F0:1 X1:2 B0:1")
    >>> print(greedy(Workload(plan.slots, num_microbatches=3), num_workers=2, costs=uniform_costs(plan)))
    0F0 1X0 1X1 1X2 0B2
    0F1 0F2 0B0 0B1
    """
    check_size("greedy", work, num_workers)
    tasks = work.tasks
    slots = {(task.kind, task.stage) for task in tasks}
    lacking = ", ".join(f"{stage}{kind}" for kind, stage in sorted(slots - costs.keys()))
    problems = [f"costs lack {lacking}"] if lacking else []
    problems += [f"cost of {problem}" for problem in cost_problems(costs, slots)]
    if problems:
        raise ScheduleError.listing("greedy", problems)
    followers = _followers(work, tasks)
    waits = Counter(node for nodes in followers.values() for node in nodes)
    paths = _longest_paths(tasks, followers, waits, costs)
    ranks = {task: (work.iteration(task), -paths[task], place) for place, task in enumerate(tasks)}

    ready = [(ranks[task], task) for task in tasks if not waits[task]]
    heapify(ready)
    idle = list(range(num_workers))
    running: list[tuple[float, int, Task]] = []
    orders: list[list[Task]] = [[] for _ in range(num_workers)]
    now: float = 0
    while ready or running:
        while ready and idle:
            worker, (_, task) = heappop(idle), heappop(ready)
            orders[worker].append(task)
            heappush(running, (now + costs[task.kind, task.stage].time, worker, task))
        now = running[0][0]
        ended: list[Node] = []
        while running and running[0][0] == now:
            _, worker, task = heappop(running)
            heappush(idle, worker)
            ended.append(task)
        for node in ended:
            for released in _release(node, followers, waits):
                if isinstance(released, Task):
                    heappush(ready, (ranks[released], released))
                else:
                    ended.append(released)
    return Schedule(tuple(map(tuple, orders)))


def _followers(work: Workload, tasks: Sequence[Task]) -> dict[Node, list[Node]]:
    """Returns for each task and awaited update what has to wait for it."""
    followers: dict[Node, list[Node]] = {task: [] for task in tasks}
    awaited = range(work.num_iterations - 1 - work.staleness)
    # updates happen in order, even where the gradients of a later one are there first
    followers |= {update: [update + 1] if update + 1 in awaited else [] for update in awaited}
    for task in tasks:
        for need in work.dependencies(task):
            followers[need].append(task)
        update = work.awaited_update(task)
        if update is not None:
            followers[update].append(task)
    for task in tasks:
        if work.iteration(task) in followers:
            followers[task].append(work.iteration(task))
    return followers


def _release(node: Node, followers: Mapping[Node, Sequence[Node]], waits: Counter[Node]) -> list[Node]:
    """Returns what may start now that `node` has ended, and takes it off what `waits` counts."""
    released = []
    for follower in followers[node]:
        waits[follower] -= 1
        if not waits[follower]:
            released.append(follower)
    return released


def _longest_paths(
    tasks: Sequence[Task], followers: Mapping[Node, Sequence[Node]], waits: Counter[Node], costs: StageCosts
) -> dict[Node, float]:
    """Returns for each node the time of the longest path that it begins."""
    waits = waits.copy()
    order: list[Node] = [task for task in tasks if not waits[task]]
    for node in order:
        order += _release(node, followers, waits)
    paths: dict[Node, float] = {}
    for node in reversed(order):
        time = costs[node.kind, node.stage].time if isinstance(node, Task) else 0.0
        paths[node] = time + max((paths[follower] for follower in followers[node]), default=0.0)
    return paths
