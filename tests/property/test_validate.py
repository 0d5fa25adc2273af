"""Schedules that can and cannot run, told apart by `validate` and by a graph of what must come before what."""

import re
from dataclasses import replace

import networkx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rpfunc.errors import ScheduleError
from rpfunc.schedule import Schedule, Task, Workload, validate


@st.composite
def workloads(draw):
    """Stages forward and backward cut alike or not, with a fused one or not; any microbatches, blocks, iterations."""
    forward, backward = draw(st.sampled_from([2, 1, 3, 0])), draw(st.sampled_from([2, 1, 3, 0]))
    fused = draw(st.booleans())
    slots = [("F", stage) for stage in range(forward)] + [("X", forward)] * fused
    slots += [("B", stage) for stage in reversed(range(backward))]
    assume(slots)
    num_microbatches, num_iterations = draw(st.sampled_from([2, 3, 4, 1])), draw(st.sampled_from([2, 1, 3]))
    passes = [(stage, m) for stage in range(backward) for m in range(num_microbatches * num_iterations)]
    return Workload(
        slots,
        num_microbatches,
        draw(st.integers(1, num_microbatches)),
        num_iterations,
        draw(st.integers(0, 1)),
        frozenset(draw(st.sets(st.sampled_from(passes))) if passes else ()),
    )


def precedence(work):
    """The graph of all tasks, and of updates by the number of their iteration: an edge from early to late."""
    graph = networkx.DiGraph()
    for m in range(work.num_microbatches * work.num_iterations):
        handed_on = None
        for kind, stage in work.slots:
            halved = (stage, m) in work.halved and kind == "B"
            first = Task(stage, "I" if halved else kind, m)
            graph.add_node(first)
            if handed_on:
                graph.add_edge(handed_on, first)
            if halved:
                graph.add_edge(first, Task(stage, "W", m))
            handed_on = first
    gradients = [task for task in graph if task.kind in ("X", "B", "W")]
    blocks = [set(block) for block in np.array_split(range(work.num_microbatches), work.num_blocks)]
    for early in gradients:
        for late in gradients:
            same_slot = early.stage == late.stage and (early.kind == "X") == (late.kind == "X")
            follows = late.microbatch == early.microbatch + 1 and of(work, late) == of(work, early)
            within = {task.microbatch % work.num_microbatches for task in (early, late)}
            if same_slot and follows and any(within <= block for block in blocks):
                graph.add_edge(early, late)
            next_iteration = of(work, late) == of(work, early) + 1
            if same_slot and next_iteration and [early, late] == buffer_handed_on(work, blocks, early, late):
                graph.add_edge(early, late)
    if gradients:
        tasks = list(graph)
        for iteration in range(work.num_iterations):
            graph.add_edge(iteration - 1, iteration)
            graph.add_edges_from((task, iteration) for task in gradients if of(work, task) == iteration)
            graph.add_edges_from(
                (iteration - 1 - work.staleness, task)
                for task in tasks
                if of(work, task) == iteration and (task.kind.replace("I", "B"), task.stage) == work.slots[0]
            )
    return graph


def buffer_handed_on(work, blocks, *tasks):
    """Those of two tasks that end and begin the sum of the same block, in this order."""
    early, late = (task.microbatch % work.num_microbatches for task in tasks)
    return (
        [*tasks]
        if any({early, late} <= block and (early, late) == (max(block), min(block)) for block in blocks)
        else []
    )


def of(work, task):
    return task.microbatch // work.num_microbatches


def tasks_of(graph):
    return [node for node in graph if isinstance(node, Task)]


def with_workers(graph, schedule):
    """The graph with an edge from each task to the next on its worker."""
    joined = graph.copy()
    for tasks in schedule.workers:
        networkx.add_path(joined, tasks)
    return joined


@st.composite
def valid(draw):
    """A workload, its graph, and a schedule that does it: tasks in an order in which they can run, dealt at random."""
    work, random = draw(workloads()), draw(st.randoms(use_true_random=False))
    graph = precedence(work)
    order, waiting = [], graph.copy()
    while waiting:
        node = random.choice([node for node, degree in waiting.in_degree() if degree == 0])
        waiting.remove_node(node)
        order += [node] if isinstance(node, Task) else []
    workers = [[] for _ in range(draw(st.sampled_from([3, 2, 4, 1])))]
    for task in order:
        random.choice(workers).append(task)
    return work, graph, schedule_of(workers)


def schedule_of(workers):
    return Schedule(tuple(map(tuple, workers)))


@st.composite
def shuffled(draw):
    """The same with tasks moved to other places, mostly so that it cannot run."""
    work, graph, schedule = draw(valid())
    workers, random = [list(tasks) for tasks in schedule.workers], draw(st.randoms(use_true_random=False))
    for _ in range(draw(st.sampled_from([20, 5, 2, 1, 0]))):
        source = random.choice([tasks for tasks in workers if tasks])
        task = source.pop(random.randrange(len(source)))
        target = random.choice(workers)
        target.insert(random.randint(0, len(target)), task)
    return work, graph, schedule_of(workers)


def message(schedule, work, **options):
    """What `validate` has to say; empty for nothing."""
    try:
        validate(schedule, work, **options)
    except ScheduleError as error:
        return str(error)
    return ""


@given(valid())
def test_whatever_can_run_is_accepted(drawn):
    work, graph, schedule = drawn
    assert sorted(tasks_of(graph)) == sorted(work.tasks)
    validate(schedule, work)
    validate(schedule, replace(work, halved=frozenset()))  # the schedule decides


@given(shuffled())
def test_validate_and_the_graph_agree_on_what_can_run(drawn):
    work, graph, schedule = drawn
    assert bool(message(schedule, work)) != networkx.is_directed_acyclic_graph(with_workers(graph, schedule))


@given(shuffled(), st.data())
def test_they_agree_where_tasks_are_missing(drawn, data):
    """What needs a missing task then waits for nothing; without it, the order may or may not be right."""
    work, graph, schedule = drawn
    lost = data.draw(st.sampled_from(schedule.tasks))
    schedule = schedule_of([[task for task in tasks if task != lost] for tasks in schedule.workers])
    work = replace(work, halved=work.halved or frozenset([(-1, -1)]))
    graph.remove_node(lost)
    told = message(schedule, work)
    assert f"{lost} is missing" in told
    in_order = networkx.is_directed_acyclic_graph(with_workers(graph, schedule))
    assert ("before" in told or "deadlock" in told) != in_order


@given(shuffled())
def test_every_task_before_one_that_it_needs_is_told(drawn):
    """Each need of its own; and of what an awaited update needs, one task of the earliest iteration."""
    work, graph, schedule = drawn
    wanted = set()
    for tasks in schedule.workers:
        for place, task in enumerate(tasks):
            later = [(late, at) for at, late in enumerate(tasks) if at > place]
            wanted |= {(task, place, late, at) for late, at in later if graph.has_edge(late, task)}
            updates = [need for need in graph.predecessors(task) if not isinstance(need, Task)]
            needed = set().union(*(networkx.ancestors(graph, update) for update in updates))
            gradients = [(late, at) for late, at in later if late in needed and late.kind in ("X", "B", "W")]
            if gradients:
                wanted.add((task, place, *min(gradients, key=lambda late: (of(work, late[0]), late[1]))))
    told = re.findall(r"worker \d+ has (\w+) \(place (\d+)\) before (\w+) \(place (\d+)\)", message(schedule, work))
    found = {(Task.parse(task), int(place), Task.parse(late), int(at)) for task, place, late, at in told}
    assert found == wanted if len(wanted) <= 8 else found < wanted


WAIT = re.compile(
    r"(worker (?P<worker>\d+) waits at (?P<at>\w+)|the update of iteration (?P<iteration>\d+) waits) for "
    r"((?P<need>\w+), which (?P<stands>stands|comes next) on worker (?P<other>\d+)( after (?P<after>\w+))?"
    r"|the update of iteration (?P<update>\d+))"
)


@given(shuffled())
def test_every_deadlock_told_is_one(drawn):
    work, graph, schedule = drawn
    places = {task: (worker, at) for worker, tasks in enumerate(schedule.workers) for at, task in enumerate(tasks)}
    for line in message(schedule, work).split("\n"):
        if "deadlock" not in line:
            continue
        waits = [WAIT.fullmatch(part) for part in line.split("deadlock: ")[1].split("; ")]
        assert 2 <= len(waits) <= 8
        owners = [wait["worker"] or f"update {wait['iteration']}" for wait in waits]
        assert len(set(owners)) == len(owners)
        for wait, following in zip(waits, [*waits[1:], waits[0]], strict=True):
            need = Task.parse(wait["need"]) if wait["need"] else int(wait["update"])
            late = Task.parse(wait["at"]) if wait["at"] else int(wait["iteration"])
            assert need in networkx.ancestors(graph, late)
            assert graph.has_edge(need, late) or not isinstance(need, Task)
            if isinstance(need, Task):
                assert (wait["other"], wait["after"] or wait["need"]) == (following["worker"], following["at"])
                head = places[Task.parse(following["at"])]
                assert head[0] == places[need][0] == int(wait["other"])
                assert head[1] <= places[need][1]
                assert (head[1] == places[need][1]) == (wait["stands"] == "comes next")
            else:
                assert following["iteration"] == wait["update"]
            if wait["at"]:
                assert places[late][0] == int(wait["worker"])


def lose(work, graph, workers, data):
    task = data.draw(st.sampled_from(tasks_of(graph)))
    return [[other for other in tasks if other != task] for tasks in workers], f"{task} is missing"


def repeat(work, graph, workers, data):
    task = data.draw(st.sampled_from(tasks_of(graph)))
    place = data.draw(st.integers(0, 20))
    at = data.draw(st.sampled_from(range(len(workers))))
    return [[*t[:place], task, *t[place:]] if w == at else t for w, t in enumerate(workers)], f"{task} stands 2 times"


def swap(work, graph, workers, data):
    """Swaps two tasks of one worker, one of which needs the other."""
    pairs = [(a, b) for a, b in graph.edges if any(a in tasks and b in tasks for tasks in workers)]
    early, late = data.draw(st.sampled_from(pairs)) if pairs else assume(False)
    swapped = {early: late, late: early}
    return [[swapped.get(task, task) for task in tasks] for tasks in workers], f"has {late} "


def exchange(work, graph, workers, data, **change):
    task = data.draw(st.sampled_from(tasks_of(graph)))
    wrong = task._replace(**{name: find(task) for name, find in change.items()})
    assume(wrong not in graph)
    return [[wrong if other == task else other for other in tasks] for tasks in workers], f"{wrong} is no part of"


def move_to_a_wrong_microbatch(work, graph, workers, data):
    return exchange(work, graph, workers, data, microbatch=lambda task: task.microbatch + len(work.all_microbatches))


def move_to_a_wrong_stage(work, graph, workers, data):
    return exchange(work, graph, workers, data, stage=lambda task: task.stage + 4)


def fuse(work, graph, workers, data):
    return exchange(work, graph, workers, data, kind=lambda task: "X")


def halve(work, graph, workers, data):
    whole = [task for task in tasks_of(graph) if task.kind == "B"]
    task = data.draw(st.sampled_from(whole)) if whole else assume(False)
    half, other = data.draw(st.permutations("IW"))
    lost, kept = task._replace(kind=other), task._replace(kind=half)
    changed = [[kept if one == task else one for one in tasks] for tasks in workers]
    return changed, f"{lost} is missing, the other half of {kept}"


def add_a_half(work, graph, workers, data):
    whole = [task for task in tasks_of(graph) if task.kind == "B"]
    task = data.draw(st.sampled_from(whole)) if whole else assume(False)
    half = task._replace(kind=data.draw(st.sampled_from("IW")))
    return [*workers, [half]], f"{half} stands beside {task}"


@pytest.mark.parametrize(
    "mutate",
    [lose, repeat, swap, move_to_a_wrong_microbatch, move_to_a_wrong_stage, fuse, halve, add_a_half],
)  # fmt: skip
@given(drawn=valid(), data=st.data())
def test_a_single_mutation_is_refused_and_its_task_named(mutate, drawn, data):
    work, graph, schedule = drawn
    workers, wanted = mutate(work, graph, [list(tasks) for tasks in schedule.workers], data)
    plain = replace(work, halved=frozenset()) if mutate in (halve, add_a_half) else work
    assert wanted in message(schedule_of(workers), plain)


@given(shuffled())
def test_bound_weights_are_on_one_worker(drawn):
    work, _, schedule = drawn
    found = re.findall(r"stage (\d+) stands on (\d+) workers", message(schedule, work, bound=True))
    on = {
        stage: {w for w, tasks in enumerate(schedule.workers) for task in tasks if task.stage == stage}
        for stage in range(5)
    }
    assert found == [(str(stage), str(len(workers))) for stage, workers in on.items() if len(workers) > 1]


@given(valid(), st.integers(1, 4))
def test_no_more_activations_are_held_than_in_flight_says(drawn, in_flight):
    work, _, schedule = drawn
    found = re.findall(r"worker (\d+) holds (\d+) activations at (\w+)", message(schedule, work, in_flight=in_flight))
    wanted = []
    for worker, tasks in enumerate(schedule.workers):
        passes = [(task.stage, task.microbatch) for task in tasks]
        for place, task in enumerate(tasks):
            held = len({one for one in passes[: place + 1] if one in passes[place + 1 :]})
            if held > in_flight:
                wanted.append((str(worker), str(held), str(task)))
                break
    assert found == wanted
