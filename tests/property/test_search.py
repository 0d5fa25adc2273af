"""The plan found by simulated time: against all plans, against the published rule, and its quick clock against the
simulator."""

from functools import partial
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc.errors import PlanError
from rpfunc.plan import partition, worker_bytes
from rpfunc.plan.bounds import lower_bound
from rpfunc.plan.clock import Candidate, Clock, settled_time
from rpfunc.plan.costs import LayerCost, slot_costs_of, stage_costs
from rpfunc.plan.deal import Deal, Pass, iteration_ends, least_time
from rpfunc.plan.hardware import Hardware
from rpfunc.plan.search import Space, search
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


@st.composite
def dealt(draw):
    """A deal of a few layers, with what its slots cost, workers and microbatches."""
    num_layers, workers, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    size = st.integers(0, 9)
    layers = [
        LayerCost.of_forward(draw(size), parameter_bytes=draw(size), gradient_bytes=draw(size), output_bytes=draw(size))
        for _ in range(num_layers)
    ]
    plan = draw(st.sampled_from(strategies.every_plan(num_layers)))
    deal = Deal(plan, tuple(draw(st.integers(1, microbatches)) for _ in plan.slots))
    return Candidate(deal, slot_costs_of(layers)(plan)), workers, microbatches


def steady(candidate, workers, microbatches, hardware, staleness, turn=0):
    deal, work = candidate.deal, candidate.deal.workload(microbatches, staleness=staleness)
    costs = dict(zip(deal.plan.slots, candidate.slots, strict=True))
    return steady_state(partial(deal.schedule, num_workers=workers), work, costs, hardware, turn=turn)


@given(dealt(), st.sampled_from([0, 1]), st.integers(0, 5))
def test_no_deal_takes_less_than_its_bound(case, staleness, update):
    """A single iteration; and joined ones, which take what the simulator finds."""
    candidate, workers, microbatches = case
    times, hardware = [slot.time for slot in candidate.slots], Hardware(update=update)
    least = least_time(candidate.deal, times, workers, microbatches)
    assert least <= iteration_ends(candidate.deal, times, workers, microbatches)[0]
    (found,) = Clock(workers, microbatches, hardware, staleness, joined=True).fastest([candidate], 1)
    expected = steady(candidate, workers, microbatches, hardware, staleness).iteration_time
    assert found.time == pytest.approx(expected, rel=1e-8)
    assert found.time >= least_time(candidate.deal, times, workers, microbatches, joined=True) * (1 - 1e-8)


@settings(max_examples=max(10, settings.default.max_examples // 3))
@given(dealt(), st.sampled_from([0, 1]), st.sampled_from([0.5, 2.0]), st.sampled_from([0.5, 2.0]), st.integers(1, 2))
def test_a_deal_is_steady_as_soon_as_it_repeats_on_the_workers_that_follow(case, staleness, up, down, ahead):
    candidate, workers, microbatches = case
    hardware = Hardware(upload=up, download=down, host_upload=3.0, prefetch_runs=ahead)
    plain, turned = (
        steady(candidate, workers, microbatches, hardware, staleness, turn) for turn in (0, candidate.deal.num_cards)
    )
    if plain.period is not None:
        assert turned.period <= plain.period
        assert turned.iteration_time == pytest.approx(plain.iteration_time)
        assert turned.bubble == pytest.approx(plain.bubble, abs=1e-9)


@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9))
def test_what_is_not_timed_is_not_among_the_fastest(forward, workers, microbatches, number):
    slot_costs = slot_costs_of(layers_of(forward))
    candidates = [
        Candidate(Deal(plan, (ways,) * len(plan.slots)), slot_costs(plan))
        for plan in strategies.every_plan(len(forward))
        for ways in range(1, microbatches + 1)
    ]
    clock = Clock(workers, microbatches, Hardware(), 0, joined=False)
    assert clock.fastest(candidates, number) == clock.fastest(candidates, len(candidates))[:number]
    known = clock.fastest(candidates[::2], 3)
    assert clock.fastest(candidates[::2], 3, known)[0] == known[0]


@given(st.data(), st.integers(1, 6))
def test_slots_of_many_plans_cost_what_those_of_one_do(data, num_layers):
    layers = data.draw(strategies.layer_costs(st.just(num_layers)))
    slot_costs = slot_costs_of(layers)
    for plan in data.draw(st.lists(strategies.plans(num_layers), min_size=1, max_size=6)):
        costs = stage_costs(plan, layers)
        assert slot_costs(plan) == [costs[slot] for slot in plan.slots]


def test_iterations_that_never_settle_take_their_last_half_on_average():
    """Updates end at square numbers, and a worker is free the later after them."""
    ended = (Pass(float(number**2), [float(number**2 + number)], []) for number in count(1))
    assert settled_time(ended, staleness=0) == (32**2 - 16**2) / 16


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
    slots = [costs[slot] for slot in tight.deal.plan.slots]
    assert worker_bytes(slots, 2, tight.deal.ways).max() <= 70.0
    with pytest.raises(
        PlanError, match="search: memory is 20 bytes a worker, 40 would do: 12 problems\n  - layer 0 alone"
    ):
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
    # more than the published rule's plan has, which is not a way out
    for hardware in (Hardware(), Hardware(upload=1.0, download=1.0)):
        assert len(search([1.0] * 10, 4, 8, hardware, least_slots=12).deal.plan.slots) >= 12


def test_plans_with_fewer_slots_are_better_than_none_that_fits():
    """Where memory leaves but the rule's plan, which splits and moved cuts still make faster."""
    layers = [LayerCost.of_forward(1.0, output_bytes=40.0, residual_bytes=float(size)) for size in (50, 9, 9, 9)]
    hardware = Hardware(memory_bytes=130.0)
    found = search(layers, 2, 4, hardware, least_slots=7)
    assert found.deal.plan.num_layers == 4
    assert found.time <= simulated_time(partition(layers, 2, 4, 130.0), layers, 2, 4)


def test_searches_of_one_space_find_what_they_find_alone():
    layers, hardware = [1.0, 2.0, 1.5] * 4, Hardware(upload=40.0, download=50.0)
    space = Space(layers, 3, 6, hardware, least_slots=3)
    for options in ({"split": False}, {"joined": True, "staleness": 1}, {}):
        assert space.search(**options) == search(layers, 3, 6, hardware, least_slots=3, **options)


def test_joined_iterations_take_what_the_simulator_finds_with_transfers():
    """They need many iterations to settle: downloads take longer than computation, and gather at first."""
    layers = [LayerCost.of_forward(1.0, parameter_bytes=6.0, gradient_bytes=11.0, output_bytes=1.0) for _ in range(9)]
    hardware = Hardware(upload=1.0, download=1.0, update=2.0)
    found = search(layers, 3, 4, hardware, staleness=1, joined=True, least_slots=3)
    plan = found.deal.plan
    measured = steady(Candidate(found.deal, slot_costs_of(layers)(plan)), 3, 4, hardware, 1)
    assert found.time == pytest.approx(measured.iteration_time)


def test_layers_that_take_no_time_are_planned_too():
    for layers, workers in (([0.0, 1.0, 1.0], 2), ([0.0] * 3, 2), ([0.0, 1.0, 1.0], 1)):
        assert search(layers, workers, 4).deal.plan.num_layers == 3


@settings(max_examples=max(10, settings.default.max_examples // 3))
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 12),
    st.booleans(), st.sampled_from([Hardware(), Hardware(upload=20.0, download=20.0)]),
)  # fmt: skip
def test_dealt_slots_are_never_worse_than_undealt_ones_and_as_many_as_asked_for(
    forward, workers, microbatches, least, joined, hardware
):
    layers = [LayerCost.of_forward(each, parameter_bytes=each, gradient_bytes=each, output_bytes=1) for each in forward]
    options = {"least_slots": least, "joined": joined}
    dealt = search(layers, workers, microbatches, hardware, **options)
    undealt = search(layers, workers, microbatches, hardware, split=False, **options)
    for found in (dealt, undealt):
        assert len(found.deal.plan.slots) >= min(least, 2 * len(layers) - 1)
    if not hardware.transfers_cost:
        assert dealt.time <= undealt.time * (1 + 1e-8)
    else:  # some of the best without transfers are simulated with them
        assert dealt.time <= undealt.time * 1.02
