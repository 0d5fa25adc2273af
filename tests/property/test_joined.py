"""Iterations that follow each other: the update that they await, and how long they take once all is settled."""

from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rpfunc.errors import ScheduleError
from rpfunc.plan import Hardware, StageCost
from rpfunc.schedule import Schedule, Workload, greedy, halve, round_robin, simulate, steady_state, validate

SLOTS = [[("B", 0)], [("X", 0)], [("F", 0), ("B", 0)], [("F", 0), ("X", 1), ("B", 0)], [("B", 1), ("B", 0)]]


@given(
    st.sampled_from(SLOTS),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 1),
    st.booleans(),
    st.integers(1, 3),
)
def test_no_iteration_begins_before_the_update_that_it_awaits(
    slots, num_microbatches, iterations, stale, halved, workers
):
    """In any order that is accepted; with transfers, too, every task is computed."""
    work = Workload(slots, num_microbatches, num_iterations=iterations, staleness=stale)
    work = halve(work) if halved else work
    costs = {slot: StageCost(2, 1, 1, 1, 1) for slot in slots} | {
        (kind, s): StageCost(1, 1, 1, 1, 1) for kind in "IW" for s in (0, 1)
    }
    schedule = greedy(work, workers, costs)
    validate(schedule, work)
    for hardware in (Hardware(), Hardware(upload=1), Hardware(upload=2, download=1, update=3)):
        events = simulate(schedule, costs, hardware, work).events
        computed = [event for event in events if event.channel == "compute"]
        assert sorted(event.task for event in computed) == sorted(work.tasks)
        for k in range(iterations - 1 - stale):
            written = [
                event.end_s for event in computed if work.iteration(event.task) == k and event.task.kind in "XBW"
            ]
            begun = [event.start_s for event in computed if work.iteration(event.task) == k + 1 + stale]
            assert min(begun) >= max(written, default=0)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("kinds", ["B", "IW"])
def test_an_order_in_which_an_iteration_overtakes_its_update_is_refused(kinds, staleness):
    work = Workload([("B", 0)], 1, num_iterations=2 + staleness, staleness=staleness)
    work = halve(work) if kinds == "IW" else work
    order = [f"0{kind}{m}" for kind in kinds for m in range(work.num_iterations)]
    schedule = Schedule.parse(" ".join(order))
    if kinds == "IW":
        with pytest.raises(ScheduleError, match="awaits the update of iteration 0"):
            validate(schedule, work)
    else:
        validate(schedule, work)  # in this order each update has ended


@example([1, 3], 2, 2)  # each slot goes to the same worker again: the first runs ahead of the second
@example([2, 9, 1], 1, 3)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 4))
def test_forward_iterations_take_what_many_of_them_take_on_average(times, num_microbatches, workers):
    """Nothing holds them up, so the first slots run ever further ahead where a later one takes longer."""
    work = Workload([("F", stage) for stage in range(len(times))], num_microbatches)
    costs = {("F", stage): StageCost(time) for stage, time in enumerate(times)}
    generate = partial(round_robin, num_workers=workers)
    found = steady_state(generate, work, costs)
    many = Workload(work.slots, num_microbatches, num_iterations=400)
    average = simulate(generate(many), costs, work=many).makespan_s / 400
    assert found.iteration_time == pytest.approx(average, rel=0.03)
    assert 0 <= found.bubble + 1e-9 <= 1
    assert found.bubble == pytest.approx(1 - num_microbatches * sum(times) / (workers * found.iteration_time))
