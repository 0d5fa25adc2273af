"""The plan found by simulated time: against all plans, against the published rule, and its quick clock against the
simulator."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc.errors import PlanError
from rpfunc.plan import partition
from rpfunc.plan.bounds import lower_bound
from rpfunc.plan.costs import LayerCost, stage_costs
from rpfunc.plan.deal import Deal, iteration_ends
from rpfunc.plan.hardware import Hardware
from rpfunc.plan.search import search
from rpfunc.schedule import Workload, round_robin, simulate, validate
from rpfunc.schedule.steady import steady_state
from rpfunc.testing import strategies


def layers_of(forward):
    return [LayerCost.of_forward(time) for time in forward]


def simulated_time(plan, layers, workers, microbatches, update=0):
    """The makespan of one iteration of the plan dealt in turn, by the simulator."""
    work = Workload(plan.slots, microbatches)
    return simulate(round_robin(work, workers), stage_costs(plan, layers), Hardware(update=update), work).makespan_s


@given(st.data(), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.sampled_from([0, 1]))
def test_the_quick_clock_is_the_simulators(data, num_layers, workers, microbatches, iterations, staleness):
    plan = data.draw(strategies.plans(num_layers))
    layers = layers_of(data.draw(st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers)))
    ways = tuple(data.draw(st.integers(1, microbatches)) for _ in plan.slots)
    update = data.draw(st.integers(0, 5))
    deal, costs = Deal(plan, ways), stage_costs(plan, layers)
    work = deal.workload(microbatches, num_iterations=iterations, staleness=staleness)
    schedule = deal.schedule(work, workers)
    validate(schedule, work)
    timeline = simulate(schedule, costs, Hardware(update=update), work)
    found = iteration_ends(
        deal,
        [costs[slot].time for slot in plan.slots],
        workers,
        microbatches,
        num_iterations=iterations,
        staleness=staleness,
        update=update,
    )
    assert found == [event.end_s for event in timeline.events if event.channel == "update"]


@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 6))
def test_without_splits_no_plan_is_faster(forward, workers, microbatches):
    layers = layers_of(forward)
    found = search(layers, workers, microbatches, split=False)
    best = min(simulated_time(plan, layers, workers, microbatches) for plan in strategies.every_plan(len(layers)))
    assert found.time == best == simulated_time(found.deal.plan, layers, workers, microbatches)
    assert found.lower_bound <= found.time * (1 + 1e-9)


@pytest.mark.parametrize(
    ("forward", "workers", "microbatches"), [([3, 1, 4, 1, 5, 9, 2, 6], 3, 6), ([1] * 7 + [4], 4, 5)]
)
def test_eight_layers_are_searched_within_2_percent(forward, workers, microbatches):
    layers = layers_of(forward)
    best = min(simulated_time(plan, layers, workers, microbatches) for plan in strategies.every_plan(len(layers)))
    assert search(layers, workers, microbatches, split=False).time <= 1.02 * best


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@given(st.lists(st.integers(1, 9), min_size=9, max_size=12), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=max(5, settings.default.max_examples // 20))
def test_it_is_never_worse_than_the_rule(split, joined, forward, workers, microbatches):
    layers = layers_of(forward)
    found = search(layers, workers, microbatches, staleness=int(joined), joined=joined, split=split)
    rule = partition(layers, workers, microbatches)
    if joined:
        work = Workload(rule.slots, microbatches, staleness=1)
        time = steady_state(partial(round_robin, num_workers=workers), work, stage_costs(rule, layers)).iteration_time
        assert found.time <= time * 1.001
    else:
        assert found.time <= simulated_time(rule, layers, workers, microbatches) * (1 + 1e-9)
    assert found.time >= lower_bound(layers, workers, microbatches, num_blocks=microbatches, staleness=int(joined)) * (
        1 - 1e-9
    )


def test_stages_that_pass_the_memory_are_left_out():
    layers = [LayerCost.of_forward(1.0, parameter_bytes=10.0, gradient_bytes=10.0) for _ in range(12)]
    free = search(layers, 2, 4)
    tight = search(layers, 2, 4, Hardware(memory_bytes=70.0))
    assert len(tight.deal.plan.slots) > len(free.deal.plan.slots)
    costs = stage_costs(tight.deal.plan, layers)
    assert all(2 * costs[slot].parameter_bytes + costs[slot].gradient_bytes <= 70.0 for slot in tight.deal.plan.slots)
    with pytest.raises(PlanError, match="layer 0 alone takes 30"):
        search(layers, 2, 4, Hardware(memory_bytes=20.0))


def test_of_deals_that_take_as_long_the_one_that_moves_less_wins():
    layers = [LayerCost.of_forward(1.0, parameter_bytes=1.0, gradient_bytes=1.0) for _ in range(4)]
    found = search(layers, workers=1, microbatches=4)
    assert set(found.deal.ways) == {1}
    assert str(found.deal.plan) == "X0:4"


def test_least_slots_keeps_the_model_in_parts():
    assert len(search([1.0] * 10, 4, 8).deal.plan.slots) == 1  # data parallelism
    assert len(search([1.0] * 10, 4, 8, least_slots=4).deal.plan.slots) >= 4
    assert len(search([1.0, 1.0], 4, 8, least_slots=9).deal.plan.slots) == 3  # all that two layers give


def test_layers_that_take_no_time_are_planned_too():
    for layers, workers in (([0.0, 1.0, 1.0], 2), ([0.0] * 3, 2), ([0.0, 1.0, 1.0], 1)):
        assert search(layers, workers, 4).deal.plan.num_layers == 3
