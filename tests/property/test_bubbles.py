"""Closed forms of bubbles against the longest path through the schedules that they describe, in exact arithmetic."""

from fractions import Fraction
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rpfunc.errors import ScheduleError
from rpfunc.schedule import (
    Schedule,
    Workload,
    bubbles,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    round_robin,
    zb_h1,
    zb_v,
)

workers, microbatches, times = st.integers(1, 7), st.integers(1, 16), st.integers(1, 5)


def longest_path(schedule, path, time, num_microbatches, staleness=0):
    """Returns when the last task ends. `path` has what a microbatch passes, as ('F', 0); W follows its I.

    Written from the rules in docs/schedules.md alone.
    """
    before = {}

    def follow(tasks):
        for task in tasks:
            before.setdefault(task, set())
        for first, second in pairwise(tasks):
            before[second].add(first)

    def update(iteration):
        return "update", iteration, None

    count = 1 + max(task.microbatch for task in schedule.tasks)
    for order in schedule.workers:
        follow([(task.kind, task.stage, task.microbatch) for task in order])
    for m in range(count):
        follow([(kind, stage, m) for kind, stage in path])
        for kind, stage, _ in [task for task in before if task[0] == "W" and task[2] == m]:
            before[kind, stage, m].add(("I", stage, m))
    for first in range(0, count, num_microbatches):
        iteration = first // num_microbatches
        own = [task for task in before if task[0] in "FXBIW" and first <= task[2] < first + num_microbatches]
        for kind, stage in {(kind, stage) for kind, stage, _ in own if kind in "XBW"}:
            follow([(kind, stage, m) for m in range(first, first + num_microbatches)])
        before[update(iteration)] = set(own)
        awaited = update(iteration - 1 - staleness)
        for m in range(first, first + num_microbatches):
            before[*path[0], m] |= {awaited} & before.keys()
    ends = {}
    for task in TopologicalSorter(before).static_order():
        ends[task] = max((ends[other] for other in before[task]), default=0) + time.get(task[0], 0)
    return max(ends.values())


def measured(schedule, path, time, num_microbatches, staleness=0):
    busy = sum(time[task.kind] for task in schedule.tasks)
    makespan = longest_path(schedule, path, time, num_microbatches, staleness)
    return 1 - Fraction(busy, len(schedule.workers) * makespan)


def classic(num_stages):
    return [("F", stage) for stage in range(num_stages)] + [("B", stage) for stage in reversed(range(num_stages))]


def halved(num_stages):
    return [("I" if kind == "B" else kind, stage) for kind, stage in classic(num_stages)]


@st.composite
def slots(draw, least=1):
    """Draws a plan's slots, S in all: any number of forward and backward stages, with or without a fused one."""
    forward, backward = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    fused = draw(st.booleans()) or backward == 0
    assume(forward + fused + backward >= least)
    turn = [("X", forward)] if fused else []
    return [("F", s) for s in range(forward)] + turn + [("B", s) for s in reversed(range(backward))]


UNIT = {"F": 1, "X": 1, "B": 1, "I": 1, "W": 1}


@given(workers, microbatches, slots(), st.integers(0, 9), st.none() | st.integers(0, 4))
def test_round_robin(num_workers, num_microbatches, path, start, above):
    round_size = None if above is None else num_workers + above
    schedule = round_robin(Workload(path, num_microbatches), num_workers, start, round_size)
    formula = bubbles.round_robin(num_workers, num_microbatches, len(path), round_size)
    assert measured(schedule, path, UNIT, num_microbatches) == formula


@given(st.data(), workers, microbatches, st.integers(2, 5))
def test_round_robin_over_asynchronous_iterations(data, num_workers, num_microbatches, num_iterations):
    path = data.draw(slots(least=num_workers))
    even = [None, *(size for size in range(num_workers, num_microbatches) if num_microbatches % size == 0)]
    round_size = data.draw(st.sampled_from(even))
    work = Workload(path, num_microbatches, num_iterations=num_iterations, staleness=1)
    schedule = round_robin(work, num_workers, 0, round_size)
    formula = bubbles.round_robin(num_workers, num_microbatches, len(path), round_size, num_iterations)
    assert measured(schedule, path, UNIT, num_microbatches, staleness=1) == formula


@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_the_steady_state_is_what_a_whole_period_of_iterations_adds(data, num_workers, num_microbatches):
    path = data.draw(slots(least=num_workers))
    ends, period = [], 2 * num_workers
    for num_iterations in (2, 2 + period):
        work = Workload(path, num_microbatches, num_iterations=num_iterations, staleness=1)
        ends.append(longest_path(round_robin(work, num_workers), path, UNIT, num_microbatches, staleness=1))
    added = 1 - Fraction(period * num_microbatches * len(path), num_workers * (ends[1] - ends[0]))
    assert bubbles.round_robin_steady(num_workers, num_microbatches, len(path)) == added


@given(workers, microbatches, slots(), st.integers(2, 4))
def test_synchronous_iterations_have_the_bubble_of_one(num_workers, num_microbatches, path, num_iterations):
    work = Workload(path, num_microbatches, num_iterations=num_iterations)
    formula = bubbles.round_robin(num_workers, num_microbatches, len(path))
    assert measured(round_robin(work, num_workers), path, UNIT, num_microbatches) == formula


@given(workers, microbatches, st.integers(1, 20))
def test_how_far_the_published_form_is_from_the_exact_one(n, m, s):
    """As docs/schedules.md derives it: the published form holds where N divides S, M >= N, and where M = N or S = N."""
    published = Fraction(m * s, n) + n - 1
    later = (n - m) * (s - n) if m < n else (-s % n) * (m - n)
    makespan = Fraction(m * s, n) / (1 - bubbles.round_robin(n, m, s))
    assert makespan == published + Fraction(later, n)
    if (m >= n and s % n == 0) or m == n or s == n:
        assert bubbles.round_robin(n, m, s) == Fraction(n * (n - 1), m * s + n * (n - 1))


def test_the_published_form_is_too_low_for_the_rest():
    path = [("X", 0), *(("B", stage) for stage in (3, 2, 1, 0))]
    found = measured(round_robin(Workload(path, 4), 2), path, UNIT, 4)
    assert found == bubbles.round_robin(2, 4, 5) == Fraction(1, 6) > Fraction(2, 22)


def test_a_cursor_that_is_reset_would_be_seen():
    path = [("X", 0), *(("B", stage) for stage in (3, 2, 1, 0))]
    work = Workload(path, 4, num_iterations=2, staleness=1)
    once = round_robin(Workload(path, 4), 2)
    again = [[task._replace(microbatch=task.microbatch + 4) for task in tasks] for tasks in once.workers]
    reset = Schedule(tuple((*first, *second) for first, second in zip(once.workers, again, strict=True)))
    formula = bubbles.round_robin(2, 4, 5, num_iterations=2)
    assert measured(round_robin(work, 2), path, UNIT, 4, staleness=1) == formula == Fraction(1, 21)
    assert measured(reset, path, UNIT, 4, staleness=1) > formula


@given(workers, microbatches, times, times)
def test_gpipe_and_one_f_one_b(num_workers, num_microbatches, forward, backward):
    path, time = classic(num_workers), {"F": forward, "B": backward}
    for schedule, formula in ((gpipe, bubbles.gpipe), (one_f_one_b, bubbles.one_f_one_b)):
        found = measured(schedule(Workload(path, num_microbatches), num_workers), path, time, num_microbatches)
        assert found == formula(num_workers, num_microbatches)
        assert found == Fraction(num_workers - 1, num_microbatches + num_workers - 1)


@given(st.integers(1, 5), microbatches, st.integers(1, 3), times, times)
def test_interleaved(num_workers, num_microbatches, chunks, forward, backward):
    num_stages = chunks * num_workers
    path, time = classic(num_stages), {"F": forward, "B": backward}
    found = measured(interleaved(Workload(path, num_microbatches), num_workers), path, time, num_microbatches)
    assert found == bubbles.interleaved(num_workers, num_microbatches, num_stages)
    if num_microbatches >= num_workers:
        assert found == Fraction(num_workers - 1, num_microbatches * chunks + num_workers - 1)


@given(workers, microbatches, st.integers(1, 12), times, times)
def test_looped_bfs(num_workers, num_microbatches, num_stages, forward, backward):
    path, time = classic(num_stages), {"F": forward, "B": backward}
    found = measured(looped_bfs(Workload(path, num_microbatches), num_workers), path, time, num_microbatches)
    assert found == bubbles.looped_bfs(num_workers, num_microbatches, num_stages)


@given(workers, microbatches)
def test_zb_h1(num_workers, num_microbatches):
    path = halved(num_workers)
    schedule = zb_h1(Workload(classic(num_workers), num_microbatches), num_workers)
    assert measured(schedule, path, UNIT, num_microbatches) == bubbles.zb_h1(num_workers, num_microbatches)


@given(workers, st.integers(0, 9))
def test_zb_v(num_workers, more):
    num_microbatches, path = 2 * num_workers - 1 + more, halved(2 * num_workers)
    schedule = zb_v(Workload(classic(2 * num_workers), num_microbatches), num_workers)
    assert measured(schedule, path, UNIT, num_microbatches) == bubbles.zb_v(num_workers, num_microbatches)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (lambda: bubbles.gpipe(0, 3), "bubbles: numbers 0, 3, 0, 1 must be whole and at least 1"),
        (
            lambda: bubbles.interleaved(4, 8, 6),
            "bubbles: 6 stages on 4 workers, needs as many for each worker; 8 stages would do",
        ),
        (
            lambda: bubbles.zb_v(4, 6),
            "bubbles: no closed form of zb_v for 6 microbatches on 4 workers; 7 microbatches would do",
        ),
        (
            lambda: bubbles.round_robin(4, 9, 3, round_size=4, num_iterations=2),
            "bubbles: no closed form for iterations that join: 2 problems\n"
            "  - rounds of 4 and 5 microbatches, needs rounds of one size\n"
            "  - 3 slots on 4 workers, needs at least 4",
        ),
    ],
)
def test_where_no_closed_form_is_known_an_error_says_so(formula, message):
    with pytest.raises(ScheduleError) as caught:
        formula()
    assert str(caught.value) == message
