from __future__ import annotations

from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.random_schedules import Case, bound_cases, cases

from rpfunc import Plan
from rpfunc.plan.costs import StageCost, uniform_costs
from rpfunc.plan.hardware import Hardware
from rpfunc.schedule import (
    Schedule,
    Workload,
    bubbles,
    gpipe,
    one_f_one_b,
    report,
    round_robin,
    simulate,
    split_dispatch,
    steady,
    steady_state,
)
from rpfunc.schedule.peaks import peak_bytes

TURN = [("F", 0), ("X", 1), ("B", 0)]


def reported(text, costs, hardware=None, work=None, *, resident=False):
    schedule, hardware = Schedule.parse(text), hardware or Hardware()
    work = work or Workload.of(schedule)
    timeline = simulate(schedule, costs, hardware, work, resident=resident)
    return report(timeline, schedule, costs, hardware, work)


def one(time=1, **sizes):
    return StageCost(Fraction(time), **{f"{name}_bytes": Fraction(size) for name, size in sizes.items()})


# why workers are idle


def test_filling_and_draining_are_told_from_waiting():
    """Worker 0 waits from 1 to 3, worker 1 fills for 1 and drains for 3; worker 2 has nothing to do."""
    found = reported("0F0 0B0\n1X0\n\n", {("F", 0): one(), ("X", 1): one(2), ("B", 0): one(3)})
    assert (found.makespan, found.bubble) == (6, Fraction(12, 18))
    assert (found.fill_drain, found.waits, found.stalls) == (Fraction(10, 18), Fraction(2, 18), 0)


def test_stalls_are_what_transfers_add():
    """3 before the first task and 2 for the gradients after the last, for each of two workers."""
    costs = {("F", 0): one(parameter=3), ("X", 1): one(2, parameter=3), ("B", 0): one(3, gradient=2)}
    found = reported("0F0 0B0\n1X0", costs, Hardware(upload=1, download=1))
    assert (found.makespan, found.bubble) == (11, Fraction(16, 22))
    assert (found.fill_drain, found.waits, found.stalls) == (Fraction(4, 22), Fraction(2, 22), Fraction(10, 22))


def test_updates_lengthen_the_makespan_only():
    found = reported("0X0", {("X", 0): one(2)}, Hardware(update=5))
    assert (found.makespan, found.bubble, found.stalls) == (7, 0, 0)


def test_a_wait_for_an_update_is_a_wait():
    work = Workload([("X", 0)], 1, num_iterations=2)
    found = reported("0X0 0X1", {("X", 0): one(2)}, Hardware(update=4), work)
    assert (found.bubble, found.waits, found.makespan) == (Fraction(1, 2), Fraction(1, 2), 12)


@given(cases())
def test_the_parts_add_up_and_none_is_negative(case: Case):
    schedule, costs, hardware, work = case
    found = report(simulate(*case), schedule, costs, hardware, work)
    assert found.bubble == found.fill_drain + found.waits + found.stalls
    assert min(found.fill_drain, found.waits, found.stalls) >= 0


@given(cases(transfers=False))
def test_without_transfers_nothing_stalls(case: Case):
    schedule, costs, hardware, work = case
    assert report(simulate(*case), schedule, costs, hardware, work).stalls == 0


# bytes


def test_bytes_are_counted_each_way_and_parameters_once_a_run():
    costs = {
        ("F", 0): one(parameter=100, input=1, output=10),
        ("X", 1): one(parameter=200, gradient=2000, input=2, output=20),
        ("B", 0): one(parameter=400, gradient=4000, input=4, output=40),
    }
    found = reported("0F0 0F1 0B0 0B1\n1X0 1X1", costs)
    assert (found.uploaded_bytes, found.downloaded_bytes) == (700 + 2 * 7, 6000 + 2 * 70)
    apart = reported("0F0 0B0\n0F1 0B1\n1X0 1X1", costs)
    assert apart.uploaded_bytes == 2 * 100 + 200 + 2 * 400 + 2 * 7
    bound = reported("0F0 0F1 0B0 0B1\n1X0 1X1", costs, resident=True)
    assert (bound.uploaded_bytes, bound.downloaded_bytes) == (2 * (7 - 1), 2 * 70)  # 0B has what 0F read


def test_what_is_on_a_worker_adds_up():
    """In units: parameters 1, gradients 10, inputs 100, outputs 1000, working 10000."""
    costs = {("X", 0): one(parameter=1, gradient=10, input=100, output=1000, working=10000)}
    assert reported("0X0", costs).peak_bytes == (11111,)


@pytest.mark.parametrize(("memory", "over"), [(99, (0, 1)), (100, (1,)), (109, (1,)), (110, ()), (float("inf"), ())])
def test_the_workers_that_pass_their_memory_are_named(memory, over):
    schedule = Schedule.parse("0F0\n1F0\n")
    costs = {("F", stage): StageCost(1, 100 + 10 * stage) for stage in (0, 1)}
    hardware, work = Hardware(memory_bytes=memory), Workload([("F", 0), ("F", 1)], 1)
    found = report(simulate(schedule, costs, hardware, work), schedule, costs, hardware, work)
    assert (found.peak_bytes, found.over_memory) == ((100, 110), over)


def test_the_next_run_is_there_already():
    costs = {("F", 0): one(5, parameter=1), ("X", 1): one(5, parameter=10), ("B", 0): one(5, parameter=100)}
    assert reported("0F0 1X0 0B0", costs).peak_bytes == (100,)
    assert reported("0F0 1X0 0B0", costs, Hardware(upload=100)).peak_bytes == (110,)
    assert reported("0F0 1X0 0B0", costs, Hardware(upload=100, prefetch_runs=2)).peak_bytes == (111,)


def test_the_next_input_is_there_already():
    costs, work = {("F", 0): one(5, input=1)}, Workload([("F", 0)], 4)
    for prefetch in (1, 2, 3):
        found = reported("0F0 0F1 0F2 0F3", costs, Hardware(upload=1, prefetch=prefetch), work)
        assert found.peak_bytes == (1 + prefetch,)


def test_outputs_and_gradients_stay_until_they_are_downloaded():
    costs, work = {("F", 0): one(1, output=3)}, Workload([("F", 0)], 4)
    assert reported("0F0 0F1 0F2 0F3", costs, Hardware(download=1), work).peak_bytes == (12,)
    costs = {("X", 0): one(gradient=5), ("B", 1): one(gradient=7)}
    work = Workload([("X", 0), ("B", 1)], 1)
    assert reported("0X0 1B0", costs, Hardware(), work).peak_bytes == (7,)
    assert reported("0X0 1B0", costs, Hardware(download=1), work).peak_bytes == (12,)


@given(cases().map(lambda case: (case, False)) | bound_cases().map(lambda case: (case, True)))
def test_peaks_are_those_of_counting_at_every_moment(drawn: tuple[Case, bool]):
    """Counts anew, at the middle between any two moments at which something happens, all that is there."""
    case, resident = drawn
    schedule, costs, _, work = case
    timeline = simulate(*case, resident=resident)
    moments = sorted({time for event in timeline.events for time in event[-2:]})
    wanted = []
    for worker in range(len(schedule.workers)):
        stays = list((bound_stays if resident else streamed_stays)(case, timeline, worker))
        middles = [(before + after) / 2 for before, after in pairwise(moments)]
        counts = [sum(size for start, end, size in stays if start < middle < end) for middle in middles]
        wanted.append((bound_weights(case, worker) if resident else 0) + max(counts, default=0))
    assert peak_bytes(timeline, schedule, costs, work) == tuple(wanted)


def extents(timeline, worker):
    """From when to when each channel had to do with each task."""
    found = {}
    for event in timeline.events:
        if event.worker == worker:
            first, last = found.get((event.channel, event.task), (event.start_s, event.end_s))
            found[event.channel, event.task] = min(first, event.start_s), max(last, event.end_s)
    return found


def streamed_stays(case, timeline, worker):
    own, costs, spans = case.schedule.workers[worker], case.costs, extents(timeline, worker)
    for task in own:
        cost, (start, end) = costs[task.kind, task.stage], spans["compute", task]
        arrives, _ = spans.get(("activation_upload", task), (start, end))
        _, leaves = spans.get(("activation_download", task), (start, end))
        yield from [
            (start, end, cost.working_bytes),
            (arrives, end, cost.input_bytes),
            (start, leaves, cost.output_bytes),
        ]
    for run in stretches(own, case.work):
        parts = [costs[task.kind, task.stage] for task in run]
        start, end = spans["compute", run[0]][0], spans["compute", run[-1]][1]
        arrives, _ = spans.get(("parameter_upload", run[0]), (start, end))
        _, leaves = spans.get(("gradient_download", run[-1]), (start, end))
        yield arrives, end, max(part.parameter_bytes for part in parts)
        yield start, leaves, max(part.gradient_bytes for part in parts)


def bound_stays(case, timeline, worker):
    """Follows the bytes of each microbatch: a stage's own list of what it has read so far."""
    own, costs, spans = case.schedule.workers[worker], case.costs, extents(timeline, worker)
    has: dict[tuple[int, int], Fraction] = {}
    for task in own:
        key, cost, (start, end) = task[::2], costs[task.kind, task.stage], spans["compute", task]
        last = max(spans["compute", other][1] for other in own if other[::2] == key)
        reading = task._replace(kind="I") if task.kind == "W" else task
        before = [other for other in case.work.dependencies(reading) if other.microbatch == task.microbatch]
        here = min((hands_on(case, other) for other in before if other in own), default=0)
        new = max(0, cost.input_bytes - has.get(key, 0))
        uploaded = max(0, new - here)
        has[key] = max(has.get(key, 0), cost.input_bytes)
        arrives, _ = spans.get(("activation_upload", task), (start, end))
        readers = [
            other
            for other in own
            if other.kind != "W" and other.microbatch == task.microbatch and task in case.work.dependencies(other)
        ]
        leaves = spans["compute", readers[0]][0] if readers else end
        _, leaves = spans.get(("activation_download", task), (start, leaves))
        yield start, end, cost.working_bytes
        yield start, leaves, cost.output_bytes
        yield arrives, last, uploaded
        yield start, last, new - uploaded


def hands_on(case, task):
    """What a slot hands on: of B and its parts the least, since a slot has one size for all microbatches."""
    parts = "BI" if task.kind in "BI" else task.kind
    return min(case.costs[part, task.stage].output_bytes for part in parts if (part, task.stage) in case.costs)


def stretches(tasks, work):
    found = []
    for task in tasks:
        name = task.stage, task.kind in "BIW", task.kind == "X", work.iteration(task)
        if not found or found[-1][0] != name:
            found.append((name, []))
        found[-1][1].append(task)
    return [own for _, own in found]


def bound_weights(case, worker):
    stages = {task.stage for task in case.schedule.workers[worker]}
    own = [
        [case.costs[task.kind, stage] for task in case.schedule.workers[worker] if task.stage == stage]
        for stage in stages
    ]
    return sum(max(c.parameter_bytes for c in costs) + max(c.gradient_bytes for c in costs) for costs in own)


def test_one_f_one_b_holds_fewer_activations_than_gpipe():
    """The first worker holds all 8 microbatches in one, no more than there are workers in the other."""
    plan, work = Plan.symmetric(4, range(4)), Workload(Plan.symmetric(4, range(4)).slots, 8)
    costs = {
        slot: cost._replace(input_bytes=1, parameter_bytes=100, gradient_bytes=100)
        for slot, cost in uniform_costs(plan).items()
    }
    held = {}
    for make in (gpipe, one_f_one_b):
        schedule = make(work, 4)
        timeline = simulate(schedule, costs, work=work, resident=True)
        held[make] = report(timeline, schedule, costs, Hardware(), work).peak_bytes
    assert held == {gpipe: (208, 208, 208, 208), one_f_one_b: (204, 203, 202, 201)}


# steady state


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 5))
def test_the_steady_state_of_round_robin_is_that_of_the_closed_form(num_workers, num_microbatches, more):
    num_slots = num_workers + more
    work = Workload([("X", stage) for stage in range(num_slots)], num_microbatches, staleness=1)
    found = steady_state(partial(round_robin, num_workers=num_workers), work, dict.fromkeys(work.slots, one()))
    assert found.bubble == bubbles.round_robin_steady(num_workers, num_microbatches, num_slots)
    assert found.period is not None


def test_without_a_change_of_workers_the_slowest_slot_counts():
    """Each slot comes to its own worker again, so an iteration takes what the slowest takes: 4 * 5."""
    work = Workload(TURN, 4, staleness=1)
    costs = {("F", 0): one(1), ("X", 1): one(5), ("B", 0): one(3)}
    found = steady_state(partial(round_robin, num_workers=3), work, costs)
    assert found == (1 - Fraction(4 * 9, 3 * 20), 20, 1)


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1))
def test_what_is_found_goes_on_without_end(data, num_workers, num_microbatches, staleness):
    """Simulates twice as many iterations as the search did, and finds the same time between starts to the very end."""
    slots = TURN[: data.draw(st.integers(1, 3))]
    costs = {slot: one(data.draw(st.integers(0, 5)), input=data.draw(st.integers(0, 3))) for slot in slots}
    hardware = Hardware(upload=Fraction(1) if data.draw(st.booleans()) else inf, update=data.draw(st.integers(0, 9)))
    work = Workload(slots, num_microbatches, staleness=staleness)
    make = partial(round_robin, num_workers=num_workers)
    found = steady_state(make, work, costs, hardware)
    assert found.period is not None
    longer = steady.repeated(work, 2 * max(8, 4 * found.period))
    starts = {}
    for event in simulate(make(longer), costs, hardware, longer).events:
        if event.channel == "compute":
            iteration = longer.iteration(event.task)
            starts[iteration] = min(starts.get(iteration, event.start_s), event.start_s)
    last = longer.num_iterations - 2  # the very last lacks a next one, whose transfers would compete with its own
    assert starts[last] - starts[last - found.period] == found.period * found.iteration_time
    work_time = num_microbatches * sum(costs[slot].time for slot in slots)
    if found.iteration_time:
        assert found.bubble == 1 - work_time / (num_workers * found.iteration_time)


def test_synchronous_iterations_follow_their_updates():
    work = Workload(TURN, 4)
    costs = {slot: one(1) for slot in TURN}
    found = steady_state(partial(round_robin, num_workers=3), work, costs, Hardware(update=Fraction(7)))
    assert found == (1 - Fraction(12, 3 * (6 + 7)), 13, 1)


def test_a_slow_update_sets_the_pace_of_asynchronous_iterations():
    work = Workload(TURN, 4, staleness=1)
    costs = {slot: one(1) for slot in TURN}
    found = steady_state(partial(round_robin, num_workers=3), work, costs, Hardware(update=Fraction(50)))
    assert found == (1 - Fraction(12, 3 * 50), 50, 1)


def test_transfers_set_the_pace_where_they_are_slowest():
    work = Workload([("X", 0)], 3, staleness=1)
    hardware = Hardware(upload=Fraction(1), download=Fraction(1))
    found = steady_state(partial(round_robin, num_workers=1), work, {("X", 0): one(1, input=4)}, hardware)
    assert found == (1 - Fraction(3, 12), 12, 1)


def test_split_slots_and_halved_passes_are_repeated_in_every_iteration():
    work = Workload([("F", 0), ("B", 0)], 2, num_blocks=2, staleness=1, halved=frozenset({(0, 0)}))
    costs = {("F", 0): one(), ("B", 0): one(2), ("I", 0): one(), ("W", 0): one()}
    found = steady_state(partial(split_dispatch, num_workers=2, ways=[1, 2]), work, costs)
    assert found.period == 2
    assert found.iteration_time >= Fraction(2 * 3, 2)


def test_a_period_that_is_not_reached_is_said():
    work = Workload([("X", stage) for stage in range(9)], 8, staleness=1)
    costs = dict.fromkeys(work.slots, one())
    found = steady_state(partial(round_robin, num_workers=8), work, costs, most=8)
    assert found.period is None
    assert steady_state(partial(round_robin, num_workers=8), work, costs, turn=9).period == 1
    assert float(found.bubble) == pytest.approx(0, abs=0.2)
