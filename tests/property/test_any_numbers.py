"""Whatever numbers come in: a refusal, or a whole and finite result; and every generated schedule runs to its end."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rpfunc.checks import LEAST, MOST
from rpfunc.errors import PlanError
from rpfunc.plan import Hardware, LayerCost, Plan, StageCost, lower_bound, partition, roofline, rule_time
from rpfunc.schedule import (
    Schedule,
    Workload,
    gpipe,
    greedy,
    halve,
    interleaved,
    looped_bfs,
    one_f_one_b,
    report,
    round_robin,
    simulate,
    split_dispatch,
    validate,
    zb_h1,
    zb_v,
)

ANY = st.floats() | st.floats(allow_subnormal=True, min_value=0, max_value=1e-300) | st.integers() | st.just(10**400)
ALLOWED = st.just(0.0) | st.floats(LEAST, MOST) | st.sampled_from([LEAST, MOST, 1.0, 3.0])
RATES = st.floats(LEAST, MOST) | st.sampled_from([LEAST, MOST, 1.0, math.inf])


def is_allowed(number):
    return number == 0 or 1e-100 <= number <= 1e100


@given(st.lists(ANY, min_size=1, max_size=6))
def test_costs_are_taken_exactly_if_every_number_is_one(numbers):
    if all(map(is_allowed, numbers)):
        assert list(StageCost(*numbers))[: len(numbers)] == numbers
    else:
        with pytest.raises(PlanError):
            StageCost(*numbers)


@given(st.data())
def test_the_timeline_has_every_task_and_ends(data):
    """Even where times and bytes are as far apart as they may be."""
    texts = ["0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", "0X0 0X1 0X2", "0F0 1X0 0I0\n0W0"]
    schedule = Schedule.parse(data.draw(st.sampled_from(texts)))
    costs = {
        (kind, stage): StageCost(*data.draw(st.lists(ALLOWED, min_size=6, max_size=6)))
        for stage, kind in sorted({(task.stage, task.kind) for task in schedule.tasks})
    }
    hardware = Hardware(
        *[data.draw(RATES) for _ in range(2)],
        data.draw(ALLOWED),
        *[data.draw(RATES) for _ in range(2)],
        update=data.draw(ALLOWED),
    )
    work = Workload.of(schedule)
    timeline = simulate(schedule, costs, hardware, work)
    found = [event.task for event in timeline.events if event.channel == "compute"]
    assert sorted(found) == sorted(schedule.tasks)
    assert math.isfinite(timeline.makespan_s)
    figures = report(timeline, schedule, costs, hardware, work)
    assert all(map(math.isfinite, (figures.makespan, figures.uploaded_bytes, *figures.peak_bytes)))
    assert 0 <= figures.bubble <= 1 or figures.bubble == pytest.approx(0, abs=1e-9)


@given(st.lists(ALLOWED, min_size=1, max_size=9), st.integers(1, 5))
def test_any_layers_are_partitioned(forward, workers):
    forward = [time if 100 * time <= MOST else time / 100 for time in forward]  # their sums are stages' costs
    plan = partition(forward, workers)
    plan.check(len(forward))
    total = sum(forward)
    assert lower_bound(forward, workers) <= rule_time(plan, forward, workers) * (1 + 1e-6) + 1e-12 * total


@given(st.lists(st.tuples(ALLOWED, ALLOWED, ALLOWED), min_size=1, max_size=3), RATES, RATES, st.integers(1, 9))
def test_any_layers_have_a_roofline(layers, upload, download, workers):
    costs = [
        LayerCost.of_forward(time / 8, parameter_bytes=size / 8, output_bytes=out / 8)
        for time, size, out in layers
        if min(filter(None, (time, size, out)), default=1) >= 8 * LEAST
    ]
    assume(costs)
    assert all(runs >= 0 for runs in roofline(costs, Hardware(upload=upload, download=download), workers))


@st.composite
def workloads(draw, slots):
    """Many iterations, stale or not, in blocks, with any backward passes halved."""
    num_microbatches, num_iterations = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    passes = [(stage, m) for kind, stage in slots if kind == "B" for m in range(num_microbatches * num_iterations)]
    halved = draw(st.sets(st.sampled_from(passes))) if passes else ()
    num_blocks, staleness = draw(st.integers(1, num_microbatches)), draw(st.integers(0, 1))
    return Workload(slots, num_microbatches, num_blocks, num_iterations, staleness, frozenset(halved))


@given(st.data(), st.integers(0, 3), st.booleans(), st.integers(0, 3), st.integers(1, 5))
def test_every_dealt_schedule_can_run(data, forward, fused, backward, num_workers):
    slots = [("F", stage) for stage in range(forward)] + [("X", forward)] * fused
    slots += [("B", stage) for stage in reversed(range(backward))]
    assume(slots)
    work = data.draw(workloads(slots))
    times = st.integers(0, 4)
    costs = {(kind, stage): StageCost(data.draw(times)) for stage in range(5) for kind in "FXBIW"}
    ways = [
        data.draw(st.integers(1, work.num_microbatches) if kind == "F" else st.sampled_from([1, work.num_blocks]))
        for kind, _ in slots
    ]
    start, above = data.draw(st.integers(0, 9)), data.draw(st.none() | st.integers(0, 2))
    round_size = None if above is None else num_workers + above
    for schedule in (
        greedy(work, num_workers, costs),
        round_robin(work, num_workers, start, round_size),
        split_dispatch(work, num_workers, ways, start),
    ):
        validate(schedule, work)
        simulate(schedule, costs, Hardware(update=data.draw(times)), work)


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_every_classic_schedule_can_run(data, num_workers, chunks):
    for generator, num_stages in (
        (gpipe, num_workers),
        (one_f_one_b, num_workers),
        (interleaved, chunks * num_workers),
        (looped_bfs, num_workers + chunks),
        (zb_h1, num_workers),
        (zb_v, 2 * num_workers),
    ):
        work = data.draw(workloads(Plan.symmetric(num_stages, range(num_stages)).slots))
        schedule = generator(work, num_workers)
        validate(schedule, halve(work) if generator in (zb_h1, zb_v) else work)


def test_updates_happen_in_order_whatever_is_there_first():
    """Here the gradients of iteration 1 are there before those of iteration 0, and iteration 3 awaits both."""
    slots = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
    work = Workload(slots, 1, num_iterations=4, staleness=1, halved=frozenset({(0, 0), (0, 2), (1, 0)}))
    times = {"0F": 0, "1F": 3, "1B": 1, "1I": 4, "1W": 3, "0B": 1, "0I": 2, "0W": 0}
    costs = {(name[1], int(name[0])): StageCost(time) for name, time in times.items()}
    validate(greedy(work, 2, costs), work)
