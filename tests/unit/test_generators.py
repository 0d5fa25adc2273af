"""Generators: every size gives a valid schedule of the promised shape; what cannot be is refused with a way out."""

import doctest
import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Plan
from rpfunc.errors import ScheduleError
from rpfunc.plan.costs import StageCost, uniform_costs
from rpfunc.schedule import (
    Schedule,
    Task,
    Workload,
    gpipe,
    greedy,
    halve,
    interleaved,
    looped_bfs,
    one_f_one_b,
    round_robin,
    simulate,
    split_dispatch,
    validate,
    zb_h1,
    zb_v,
)
from rpfunc.schedule.building import even_runs

workers, microbatches, chunks = st.integers(1, 6), st.integers(1, 12), st.integers(1, 3)


def classic(num_stages):
    return Plan.symmetric(num_stages, range(num_stages)).slots


def placed(schedule):
    """Returns the stages of each worker."""
    return [sorted({task.stage for task in tasks}) for tasks in schedule.workers]


def most_held(tasks):
    """Returns the most activations that a worker holds between F and B, or F and W."""
    held = most = 0
    for task in tasks:
        held += {"F": 1, "B": -1, "W": -1}.get(task.kind, 0)
        most = max(most, held)
    return most


@st.composite
def workloads(draw, slots):
    """Draws a workload of these slots: blocks, iterations, staleness, and which backward passes are halved."""
    num_microbatches, num_iterations = draw(microbatches), draw(st.integers(1, 3))
    passes = [(stage, m) for kind, stage in slots if kind == "B" for m in range(num_microbatches * num_iterations)]
    halved = draw(st.sampled_from([[], passes, passes[::2], passes[1::3]]))
    num_blocks, staleness = draw(st.integers(1, num_microbatches)), draw(st.integers(0, 1))
    return Workload(slots, num_microbatches, num_blocks, num_iterations, staleness, frozenset(halved))


@st.composite
def asymmetric(draw):
    """Draws the slots of any plan, and a cut of it for split dispatch."""
    forward, backward = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    return [("F", s) for s in range(forward)] + [("X", forward)] + [("B", s) for s in reversed(range(backward))]


@given(st.data(), workers, chunks)
def test_classic_pipelines_are_valid_and_their_stages_stay(data, num_workers, chunks):
    for generator, num_stages, stages_of in (
        (gpipe, num_workers, lambda n: [n]),
        (one_f_one_b, num_workers, lambda n: [n]),
        (interleaved, num_workers * chunks, lambda n: range(n, num_workers * chunks, num_workers)),
        (looped_bfs, num_workers + chunks, lambda n: range(n, num_workers + chunks, num_workers)),
    ):
        work = data.draw(workloads(classic(num_stages)))
        schedule = generator(work, num_workers)
        validate(schedule, work, bound=True)
        assert placed(schedule) == [list(stages_of(worker)) for worker in range(num_workers)]


@given(st.data(), workers)
def test_zero_bubble_schedules_do_the_halved_workload(data, num_workers):
    for generator, num_stages in ((zb_h1, num_workers), (zb_v, 2 * num_workers)):
        work = data.draw(workloads(classic(num_stages)))
        schedule = generator(work, num_workers)
        validate(schedule, halve(work), bound=True, in_flight=num_stages)
        assert all(most_held(tasks) <= num_stages for tasks in schedule.workers)
        once = Workload(work.slots, work.num_microbatches)
        assert Workload.of(generator(once, num_workers)) == halve(once)


@given(workers, microbatches)
def test_one_f_one_b_holds_no_more_than_workers_that_follow(num_workers, num_microbatches):
    schedule = one_f_one_b(Workload(classic(num_workers), num_microbatches), num_workers)
    held = [most_held(tasks) for tasks in schedule.workers]
    assert held == [min(num_microbatches, num_workers - worker) for worker in range(num_workers)]


@given(workers, microbatches)
def test_gpipe_holds_all_microbatches(num_workers, num_microbatches):
    schedule = gpipe(Workload(classic(num_workers), num_microbatches), num_workers)
    assert [most_held(tasks) for tasks in schedule.workers] == [num_microbatches] * num_workers


@given(workers, microbatches, chunks)
def test_looped_runs_are_whole(num_workers, num_microbatches, chunks):
    """A stage's parameters are needed in one stretch forward and one backward."""
    schedule = looped_bfs(Workload(classic(chunks * num_workers), num_microbatches), num_workers)
    for tasks in schedule.workers:
        stretches = Counter(
            (task.kind, task.stage) for before, task in pairwise([None, *tasks]) if not before or task[:2] != before[:2]
        )
        assert set(stretches.values()) == {1}


def test_zb_v_goes_down_the_workers_and_back():
    assert placed(zb_v(Workload(classic(6), 3), 3)) == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize(
    ("generator", "num_stages", "num_workers", "num_microbatches", "text"),
    [
        (gpipe, 3, 3, 2, "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B0 2B1"),
        (
            one_f_one_b,
            3,
            3,
            4,
            "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
        ),
        (
            interleaved,
            4,
            2,
            4,
            "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n"
            "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
        ),
        (looped_bfs, 3, 2, 2, "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 1B0 1B1"),
        (
            zb_h1,
            3,
            3,
            4,
            "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3\n"
            "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3\n"
            "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
        ),
    ],
)
def test_small_schedules_are_as_in_the_papers_figures(generator, num_stages, num_workers, num_microbatches, text):
    assert generator(Workload(classic(num_stages), num_microbatches), num_workers) == Schedule.parse(text)


def assert_dealt(schedule, work, cards, start):
    """Asserts that card c, a slot and the size of its run, is all that worker (start + c) mod N has next."""
    left = [list(tasks) for tasks in schedule.workers]
    passed = Counter()
    for place, ((kind, stage), size) in enumerate(cards, start):
        tasks = left[place % len(left)]
        for m in range(passed[kind, stage], passed[kind, stage] + size):
            for part in "IW" if kind == "B" and (stage, m) in work.halved else kind:
                assert tasks.pop(0) == Task(stage, part, m)
        passed[kind, stage] += size
    assert not any(left)


def even(count, parts):
    """Returns `parts` sizes that differ by at most one, larger first."""
    return sorted([(count + part) // parts for part in range(parts)], reverse=True)


@given(st.data(), asymmetric(), st.integers(1, 5), st.integers(-3, 9), st.none() | st.integers(0, 4))
def test_round_robin_deals_every_card_to_the_next_worker(data, slots, num_workers, start, above):
    work = data.draw(workloads(slots))
    round_size = None if above is None else num_workers + above
    schedule = round_robin(work, num_workers, start, round_size)
    validate(schedule, work)
    sizes = even(work.num_microbatches, max(1, work.num_microbatches // (round_size or work.num_microbatches)))
    assert len(sizes) == 1 or sizes[-1] >= round_size
    cards = [(slot, size) for size in sizes * work.num_iterations for slot in slots]
    assert_dealt(schedule, work, cards, start)


@given(st.data(), asymmetric(), st.integers(1, 5), st.integers(0, 9))
def test_split_dispatch_deals_every_card_to_the_next_worker(data, slots, num_workers, start):
    work = data.draw(workloads(slots))
    ways = [
        data.draw(st.integers(1, work.num_microbatches) if kind == "F" else st.sampled_from([1, work.num_blocks]))
        for kind, _ in slots
    ]
    schedule = split_dispatch(work, num_workers, ways, start)
    validate(schedule, work)
    cut = [
        (slot, size) for slot, number in zip(slots, ways, strict=True) for size in even(work.num_microbatches, number)
    ]
    assert_dealt(schedule, work, cut * work.num_iterations, start)
    assert schedule == split_dispatch(work, num_workers, dict(zip(slots, ways, strict=True)), start)


@given(st.data(), asymmetric(), st.integers(1, 5), st.integers(0, 9))
def test_split_dispatch_that_splits_nothing_is_round_robin(data, slots, num_workers, start):
    work = data.draw(workloads(slots))
    assert split_dispatch(work, num_workers, {}, start) == round_robin(work, num_workers, start)


@given(st.integers(2, 12), st.data())
def test_the_blocks_that_an_error_asks_for_do(num_microbatches, data):
    slots = [("F", 0), ("X", 1), ("B", 0)]
    ways = {slot: data.draw(st.integers(1, num_microbatches)) for slot in slots}
    try:
        split_dispatch(Workload(slots, num_microbatches), 3, ways)
    except ScheduleError as error:
        asked = int(str(error).split("num_blocks=")[1].split()[0])
        work = Workload(slots, num_microbatches, num_blocks=asked)
        validate(split_dispatch(work, 3, ways), work)
        with pytest.raises(ScheduleError, match="gradient block"):
            split_dispatch(Workload(slots, num_microbatches, num_blocks=asked - 1), 3, ways)
    else:
        assert ways["X", 1] == ways["B", 0] == 1


@given(st.data(), asymmetric(), st.integers(1, 5), st.integers(0, 10**6))
def test_greedy_is_valid_and_within_grahams_bound(data, slots, num_workers, seed):
    """No longer than busy time / N + (N - 1) / N * the longest chain of tasks, in exact arithmetic."""
    work = data.draw(workloads(slots))
    names = sorted({(task.kind, task.stage) for task in work.tasks})
    costs = {name: StageCost(Fraction((seed // (7 + place)) % 5)) for place, name in enumerate(names)}
    schedule = greedy(work, num_workers, costs)
    validate(schedule, work)
    once = Workload(
        slots,
        work.num_microbatches,
        work.num_blocks,
        halved=frozenset(p for p in work.halved if p[1] < work.num_microbatches),
    )
    busy = sum(costs[task.kind, task.stage].time for task in once.tasks)
    chain, longest = (
        alone(once, greedy(once, 10**3, costs), costs),
        alone(once, greedy(once, num_workers, costs), costs),
    )
    assert longest <= busy / num_workers + Fraction(num_workers - 1, num_workers) * chain


def alone(work, schedule, costs):
    """Returns when the last task ends; tasks start once those before on their worker and what they need have ended."""
    ends, left = {}, [list(tasks) for tasks in schedule.workers]
    free = [Fraction(0)] * len(left)
    while any(left):
        for worker, tasks in enumerate(left):
            while tasks and all(need in ends for need in work.dependencies(tasks[0])):
                task = tasks.pop(0)
                start = max([free[worker], *(ends[need] for need in work.dependencies(task))])
                free[worker] = ends[task] = start + costs[task.kind, task.stage].time
    return max(free)


@pytest.mark.parametrize(("backward", "text"), [(3.0, "0F0 1X0 0F1 1X1 0B0 0B1"), (9.0, "0F0 1X0 0B0 0F1 1X1 0B1")])
def test_greedy_takes_first_what_has_most_time_after_it(backward, text):
    """Forward 1 begins a path of 1 + 3 + backward, backward 0 one of twice the backward's time."""
    plan = Plan.parse("F0:1 X1:2 B0:1")
    costs = {**uniform_costs(plan), ("B", 0): StageCost(backward)}
    assert greedy(Workload(plan.slots, 2), 1, costs) == Schedule.parse(text)


TURN = [("F", 0), ("X", 1), ("B", 0)]
REFUSED = [
    (
        lambda: gpipe(Workload(classic(3), 2), 4),
        "gpipe: needs one forward stage for each worker, found 3 for 4; a plan with 4 or num_workers=3 would do",
    ),
    (
        lambda: one_f_one_b(Workload(TURN, 2), 1),
        "one_f_one_b: needs forward stages and the same stages backward, none fused, as Plan.symmetric has them; "
        "found 0F 1X 0B",
    ),
    (
        lambda: gpipe(Workload([("X", 0)], 2), 2),
        "gpipe: 2 problems\n"
        "  - needs forward stages and the same stages backward, none fused, as Plan.symmetric has them; found 0X\n"
        "  - needs one forward stage for each worker, found 0 for 2; a plan with 2 would do",
    ),
    (
        lambda: interleaved(Workload(classic(6), 2), 4),
        "interleaved: needs as many forward stages for each worker, found 6 for 4; "
        "a plan with 4 or num_workers=6 would do",
    ),
    (
        lambda: looped_bfs(Workload(TURN, 2), 2),
        "looped_bfs: needs forward stages and the same stages backward, none fused, as Plan.symmetric has them; "
        "found 0F 1X 0B",
    ),
    (
        lambda: zb_h1(Workload(classic(3), 2), 2),
        "zb_h1: needs one forward stage for each worker, found 3 for 2; a plan with 2 or num_workers=3 would do",
    ),
    (
        lambda: zb_v(Workload(classic(3), 2), 3),
        "zb_v: needs two forward stages for each worker, found 3 for 3; a plan with 6 would do",
    ),
    (lambda: zb_v(Workload(classic(2), 2), 0), "zb_v: num_workers is 0, it must be at least 1"),
    (lambda: greedy(Workload(TURN, 2), -1, {}), "greedy: num_workers is -1, it must be at least 1"),
    (lambda: greedy(Workload(TURN, 2), 1, {("X", 1): StageCost(1.0)}), "greedy: costs lack 0B, 0F"),
    (
        lambda: round_robin(Workload(TURN, 8), 4, round_size=3),
        "round_robin: round_size is 3, fewer than the 4 workers, which would wait for each other; "
        "round_size=4 would do",
    ),
    (
        lambda: split_dispatch(Workload(TURN, 6, num_blocks=2), 2, {("X", 1): 3, ("B", 0): 2, ("F", 0): 5}),
        "split_dispatch: slots 1X in 3 ways would be cut inside a gradient block, num_blocks is 2; "
        "num_blocks=5 would do",
    ),
    (
        lambda: split_dispatch(Workload(TURN, 2), 2, [1, 3]),
        "split_dispatch: 2 problems\n"
        "  - ways has 2 numbers, there are 3 slots\n"
        "  - slot 1X in 3 ways, it must be 1 to 2, the number of microbatches",
    ),
    (
        lambda: split_dispatch(Workload(TURN, 2), 2, {("B", 1): 2, ("F", 0): 0}),
        "split_dispatch: 2 problems\n"
        "  - ways has ('B', 1), which is no slot, they are such as ('F', 0)\n"
        "  - slot 0F in 0 ways, it must be 1 to 2, the number of microbatches",
    ),
]


@pytest.mark.parametrize(("generate", "message"), REFUSED, ids=[message.split(":")[0] for _, message in REFUSED])
def test_what_cannot_be_is_refused_with_what_would_do(generate, message):
    with pytest.raises(ScheduleError) as caught:
        generate()
    assert str(caught.value) == message


@given(st.integers(1, 30), st.data())
def test_even_runs_cover_everything_larger_first(count, data):
    runs = even_runs(count, data.draw(st.integers(1, count)))
    assert [m for run in runs for m in run] == list(range(count))
    sizes = [len(run) for run in runs]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


DOCS = Path(__file__).parents[2] / "docs" / "schedules.md"
SIX = [("F", 0), ("X", 1), ("B", 3), ("B", 2), ("B", 1), ("B", 0)]
DRAWN = [
    gpipe(Workload(classic(3), 4), 3),
    one_f_one_b(Workload(classic(3), 4), 3),
    interleaved(Workload(classic(4), 4), 2),
    looped_bfs(Workload(classic(4), 4), 2),
    zb_h1(Workload(classic(3), 4), 3),
    zb_v(Workload(classic(4), 3), 2),
    round_robin(Workload(SIX, 6), 3, round_size=3),
    round_robin(Workload(TURN, 4), 3),
    split_dispatch(Workload(TURN, 4, num_blocks=2), 3, {("X", 1): 2}),
]


def test_the_drawings_in_the_documentation_are_what_the_generators_make():
    drawings = re.findall(r"(?:^worker .*\n)+", DOCS.read_text(), re.MULTILINE)
    assert len(drawings) == len(DRAWN)
    for drawing, schedule in zip(drawings, DRAWN, strict=True):
        rows = [line.removeprefix(f"worker {worker}  ") for worker, line in enumerate(drawing.splitlines())]
        assert Schedule.parse("\n".join(rows).replace("-", "")) == schedule
        longer = 2 if "1X0----" in drawing else 1
        costs = {(kind, stage): StageCost(longer if kind == "X" else 1) for stage in range(4) for kind in "FXBIW"}
        work = Workload.of(schedule) if longer == 1 else Workload(TURN, 4, num_blocks=2)
        for event in simulate(schedule, costs, work=work).events:
            if event.channel == "compute":
                assert rows[event.worker].index(str(event.task)) == 4 * event.start_s


def test_the_examples_in_the_documentation_run():
    results = doctest.testfile(str(DOCS), module_relative=False)
    assert results.attempted >= 10
    assert results.failed == 0
