"""The chosen plan is the best of all plans under the published rule, with and without a limit on memory."""

from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import every_partition as oracle

from rpfunc.errors import PlanError
from rpfunc.plan import (
    Ahead,
    LayerCost,
    Plan,
    classic_partition,
    lower_bound,
    partition,
    partition_jointly,
    rule_time,
    stage_costs,
    worker_bytes,
)
from rpfunc.plan.costs import layer_costs
from rpfunc.plan.held import SlotRoom
from rpfunc.plan.rule import best_plans
from rpfunc.schedule import Workload, round_robin, simulate
from rpfunc.testing import strategies

MANY = settings(max_examples=5 * settings.default.max_examples)
UP_TO_8 = st.integers(1, 8)
SIZES = LayerCost.of_forward(0, parameter_bytes=3, gradient_bytes=2, output_bytes=5, residual_bytes=4)


def assert_best(plan, layers, workers, memory=float("inf")):
    """Raises AssertionError unless no plan whose slots fit has a better score, or fewer slots with the same."""
    plan.check(len(layers))
    assert all(oracle.fits(layers, *slot, memory) for slot in oracle.slots(plan))
    assert oracle.score([layers], [plan], workers) == oracle.best_score([layers], workers, [True], memory)


@MANY
@given(strategies.layer_costs(UP_TO_8), st.integers(1, 12))
def test_no_plan_is_better(layers, workers):
    assert_best(partition(layers, workers), layers, workers)


@MANY
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 12))
def test_no_plan_is_better_where_backward_takes_three_times_the_forward(costs, workers):
    assert_best(partition(costs, workers), layer_costs(costs), workers)


@pytest.mark.parametrize("workers", range(1, 6))
def test_no_plan_is_better_for_any_small_costs(workers):
    for costs in product(range(3), repeat=4):
        assert_best(partition(costs, workers), layer_costs(costs), workers)


def largest(layers, plan):
    """The bytes of the largest slot of several layers."""
    slots = [slot for slot in oracle.slots(plan) if slot[2] - slot[1] > 1]
    return max((oracle.num_bytes(layers, *slot) for slot in slots), default=-1)


def held(layers, plan, workers):
    costs = stage_costs(plan, layers)
    return worker_bytes([costs[slot] for slot in plan.slots], workers).max()


@MANY
@given(strategies.layer_costs(UP_TO_8), st.integers(1, 12), st.integers(-1, 300))
def test_no_plan_whose_slots_fit_is_better(layers, workers, memory):
    rooms = {kind: SlotRoom(kind, layers, Ahead()) for kind in "FXB"}
    (plan,) = best_plans([layers], [True], workers, [rooms], memory)
    assert_best(plan, layers, workers, memory)


@MANY
@given(strategies.layer_costs(st.integers(1, 5)), st.integers(1, 9), st.integers(0, 300))
def test_no_plan_that_fits_is_better_unless_the_best_would_pass_the_memory_together(layers, workers, memory):
    number = len(layers)
    least = min(held(layers, plan, workers) for plan in (Plan.single(number), Plan.cut(number, *[range(number)] * 2)))
    if memory < least:
        with pytest.raises(PlanError, match=f"^partition: memory is {memory} bytes a worker, {least:.0f} would do: "):
            partition(layers, workers, memory=memory)
        return
    plan = partition(layers, workers, memory=memory)
    assert held(layers, plan, workers) <= memory
    if plan == Plan.single(number):
        return  # the way out
    # the best for some limit, and one below the memory only if it has to be
    assert_best(plan, layers, workers, largest(layers, plan))
    best = oracle.best_score([layers], workers, [True], memory)
    if oracle.score([layers], [plan], workers) > best:
        slots_fit = [
            other
            for other in strategies.every_plan(len(layers))
            if all(oracle.fits(layers, *slot, memory) for slot in oracle.slots(other))
        ]
        bests = [other for other in slots_fit if oracle.score([layers], [other], workers) == best]
        assert any(held(layers, other, workers) > memory for other in bests)


@MANY
@given(
    st.lists(st.tuples(strategies.layer_costs(st.integers(1, 5)), st.booleans()), min_size=1, max_size=3),
    st.integers(1, 12),
    st.none() | st.integers(0, 200),
)
def test_no_plans_of_several_models_are_better(models, workers, memory):
    layers, trained = zip(*models, strict=True)
    rooms = [
        {kind: SlotRoom(kind, own, Ahead()) for kind in ("FXB" if trains else "F")}
        for own, trains in zip(layers, trained, strict=True)
    ]
    if memory is None:
        plans, memory = partition_jointly(layers, workers, trained), float("inf")
    else:
        plans = best_plans(layers, trained, workers, rooms, memory)
    assert oracle.score(layers, plans, workers) == oracle.best_score(layers, workers, trained, memory)
    for plan, own, trains in zip(plans, layers, trained, strict=True):
        plan.check(len(own), trained=trains)
        assert all(oracle.fits(own, *slot, memory) for slot in oracle.slots(plan))
        assert trains or {kind for kind, _, _ in oracle.slots(plan)} == {"F"}


@MANY
@given(st.lists(st.integers(1, 99).map(lambda cost: cost / 10), min_size=1, max_size=7), st.integers(1, 9))
def test_measured_times_give_the_best_plan_but_for_rounding(costs, workers):
    layers = layer_costs(costs)
    score, _ = oracle.score([layers], [partition(costs, workers)], workers)
    assert score == pytest.approx(oracle.best_score([layers], workers, [True])[0], rel=1e-8)


@given(st.lists(st.just(0.0) | st.floats(1e-100, 1e98), min_size=1, max_size=8), st.integers(1, 9))
def test_any_times_give_a_plan(costs, workers):
    partition(costs, workers).check(len(costs))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5), st.sampled_from([1e-6, 0.1, 7.0, 1e12]))
def test_the_unit_of_costs_does_not_matter(costs, workers, unit):
    assert partition([cost * unit for cost in costs], workers) == partition(costs, workers)


@settings(max_examples=max(5, settings.default.max_examples // 2))
@given(strategies.layer_costs(st.integers(9, 16), most=30), st.integers(1, 40))
def test_no_plan_of_more_layers_is_better(layers, workers):
    """The least slowest slot for each number of slots, layer by layer: too many plans to look at every one."""
    num_layers = len(layers)

    def least(kind):
        table = {(0, 0): 0}
        for stop in range(1, num_layers):
            for number in range(1, stop + 1):
                table[number, stop] = min(
                    max(table[number - 1, start], oracle.time(layers, kind, start, stop))
                    for start in range(number - 1, stop)
                    if (number - 1, start) in table
                )
        return table

    forward, backward = least("F"), least("B")
    scores = [
        (max(one, other, oracle.time(layers, "X", turn, num_layers)) * max(number, workers), number)
        for (forwards, turn), one in forward.items()
        for (backwards, stop), other in backward.items()
        if turn == stop
        for number in [forwards + backwards + 1]
    ]
    assert oracle.score([layers], [partition(layers, workers)], workers) == min(scores)


@given(strategies.layer_costs(UP_TO_8), st.integers(1, 9), st.integers(1, 9))
def test_fewer_microbatches_keep_fewer_workers_busy(layers, workers, microbatches):
    assert partition(layers, workers, microbatches) == partition(layers, min(workers, microbatches))


def test_backward_is_cut_three_times_as_often_as_forward():
    assert str(partition([1] * 8, 5)) == "F0:6 X6:8 B0:2 B2:4 B4:6"


def test_one_microbatch_is_never_recomputed():
    assert partition([1.0] * 8, workers=4, microbatches=1) == Plan.single(8)


def test_a_layer_too_large_is_named_with_the_memory_that_would_do():
    layers = [SIZES, LayerCost.of_forward(0, parameter_bytes=9, gradient_bytes=2), SIZES]
    with pytest.raises(PlanError) as caught:
        partition(layers, 2, memory=19)
    assert str(caught.value) == (
        "partition: memory is 19 bytes a worker, 32 would do: 3 problems\n"
        "  - layer 0 alone takes 26 (with the next slot's parameters, the last one's gradients, and activations)\n"
        "  - layer 1 alone takes 31 (with the next slot's parameters, the last one's gradients, and activations)\n"
        "  - layer 2 alone takes 32 (with the next slot's parameters, the last one's gradients, and activations)"
    )
    assert str(partition(layers, 2, memory=32)) == "F0:1 F1:2 X2:3 B0:1 B1:2"
    with pytest.raises(PlanError, match=r"memory is 31.5 bytes a worker, 32 would do: layer 2 alone takes 32 \(with"):
        partition(layers, 2, memory=31.5)


def test_every_layer_too_large_is_named_with_its_model():
    with pytest.raises(PlanError) as caught:
        partition_jointly([[SIZES], [SIZES]], 1, [True, False], memory=10)
    assert str(caught.value) == (
        "partition: memory is 10 bytes a worker, 17 would do: layer 0 of model 0 alone takes 17 "
        "(with the next slot's parameters, the last one's gradients, and activations)"
    )


@pytest.mark.parametrize(
    ("costs", "workers", "message"),
    [
        ([], 1, "costs: has no layer, needs at least one"),
        ([1.0, -1.0], 1, "costs: layer 1 costs -1.0, it must be at least 0 and finite"),
        (
            [float("inf"), 1.0, float("nan")], 2,
            "costs: 2 problems\n"
            "  - layer 0 costs inf, it must be at least 0 and finite\n"
            "  - layer 2 costs nan, it must be at least 0 and finite",
        ),
        ([1.0], 0, "partition: workers is 0, it must be at least 1"),
    ],
)  # fmt: skip
def test_costs_and_workers_that_mean_nothing_are_refused(costs, workers, message):
    with pytest.raises(PlanError) as caught:
        partition(costs, workers)
    assert str(caught.value) == message


def test_models_that_do_not_match_are_refused():
    with pytest.raises(PlanError) as caught:
        partition_jointly([], 1, [True], microbatches=0)
    assert str(caught.value) == (
        "partition: 3 problems\n"
        "  - has no model, needs at least one\n"
        "  - trained says so of 1 models, there are 0\n"
        "  - microbatches is 0, it must be at least 1"
    )


@given(st.data(), st.integers(1, 6), st.integers(1, 5), st.integers(1, 6))
def test_nothing_takes_less_than_the_lower_bound(data, num_layers, workers, microbatches):
    layers = data.draw(strategies.layer_costs(st.just(num_layers)), "layers")
    plan = data.draw(strategies.plans(num_layers), "plan")
    asynchronous = lower_bound(layers, workers, microbatches, staleness=1)
    assert rule_time(plan, layers, workers, microbatches) >= asynchronous * (1 - 1e-12)
    blocks = data.draw(st.integers(1, microbatches), "blocks")
    costs = stage_costs(plan, layers)
    work = Workload(plan.slots, microbatches, num_blocks=blocks)
    makespan = simulate(round_robin(work, workers), costs, work=work).makespan_s
    assert makespan >= lower_bound(layers, workers, microbatches, num_blocks=blocks) * (1 - 1e-12)
    iterations = 5
    work = Workload(plan.slots, microbatches, num_iterations=iterations, staleness=1)
    makespan = simulate(round_robin(work, workers), costs, work=work).makespan_s
    assert makespan >= iterations * asynchronous * (1 - 1e-12)


def test_the_lower_bound_is_reached():
    assert lower_bound([1.0] * 4, workers=1, microbatches=3) == rule_time(Plan.single(4), [1.0] * 4, 1, 3) == 36.0
    assert lower_bound([1.0] * 4, workers=3, microbatches=1) == rule_time(Plan.single(4), [1.0] * 4, 3, 1) == 12.0
    # eight slots of 3 for 8 workers
    costs, plan = [1.0] * 9, partition([1.0] * 9, 12)
    assert lower_bound(costs, 12, 24) == rule_time(plan, costs, 12, 24) == 72.0


@given(strategies.layer_costs(UP_TO_8), st.integers(1, 8))
def test_no_symmetric_plan_has_a_cheaper_dearest_stage(layers, stages):
    def dearest(plan):
        return max(oracle.time(layers, "F", *span) + oracle.time(layers, "B", *span) for span in plan.forward)

    stages = min(stages, len(layers))
    chosen = classic_partition(layers, stages)
    every = [plan for plan in strategies.every_symmetric_plan(len(layers)) if len(plan.forward) == stages]
    assert chosen in every
    assert dearest(chosen) == min(map(dearest, every))


def busiest(layers, cuts, workers):
    loads = [0] * workers
    for stage, span in enumerate(pairwise(cuts)):
        loads[stage % workers] += oracle.time(layers, "F", *span) + oracle.time(layers, "B", *span)
    return max(loads)


@given(
    st.integers(1, 3), st.integers(2, 3), st.integers(0, 4), st.integers(0, 20), st.integers(0, 20), st.integers(1, 4)
)
def test_no_worker_of_a_loop_has_less_to_do_where_inner_layers_are_alike(workers, rounds, more, first, last, inner):
    stages = workers * rounds
    layers = layer_costs([first, *[inner] * (stages + more - 2), last])
    every = [[0, *cuts, len(layers)] for cuts in combinations(range(1, len(layers)), stages - 1)]
    chosen = classic_partition(layers, stages, workers)
    chosen.check(len(layers))
    cuts = [*(span.start for span in chosen.forward), len(layers)]
    assert len(cuts) == stages + 1
    assert busiest(layers, cuts, workers) == min(busiest(layers, cuts, workers) for cuts in every)


@given(st.data(), st.integers(1, 3), st.integers(2, 3))
def test_a_loop_is_never_worse_off_than_with_the_stages_most_alike(data, workers, rounds):
    stages = workers * rounds
    layers = data.draw(strategies.layer_costs(st.integers(stages, stages + 6)))
    cuts = [
        [*(span.start for span in classic_partition(layers, stages, own).forward), len(layers)]
        for own in (workers, stages)
    ]
    assert busiest(layers, cuts[0], workers) <= busiest(layers, cuts[1], workers)


def test_stages_that_cannot_be_are_refused():
    with pytest.raises(PlanError) as caught:
        classic_partition([1, 1, 1], stages=4, workers=0)
    assert str(caught.value) == (
        "classic_partition: 2 problems\n"
        "  - stages is 4, it must be from 1 to the number of layers, 3\n"
        "  - workers is 0, it must be at least 1"
    )
