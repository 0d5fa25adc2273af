import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpfunc.errors import PlanError
from rpfunc.plan import LayerCost, Plan, StageCost, partition, stage_costs, uniform_costs
from rpfunc.plan.costs import layer_costs
from rpfunc.schedule import Schedule, Workload, simulate
from rpfunc.testing import strategies

# each number of each layer stands out: layer 0 has ones, layer 1 tens, layer 2 hundreds
LAYERS = [LayerCost(*(unit * number for number in range(1, 10))) for unit in (1, 10, 100)]


def test_stages_cost_what_their_layers_cost():
    costs = stage_costs(Plan.parse("F0:2 X2:3 B0:1 B1:2"), LAYERS)
    assert list(costs) == [
        ("F", 0), ("X", 1), ("B", 1), ("I", 1), ("W", 1), ("B", 0), ("I", 0), ("W", 0),
    ]  # fmt: skip
    # forward hands on its own output, 80, and what stage 1B starts from, 8
    assert costs["F", 0] == StageCost(11, 66, 0, 0, 88, working_bytes=80)
    # fused reads 80 and gives its cotangent back; nothing follows
    assert costs["X", 1] == StageCost(300, 600, 700, 80, 80, working_bytes=800 + 900)
    # backward reads its input, 8, and the cotangent of its output, 80
    assert costs["B", 1] == StageCost(20, 60, 70, 88, 8, working_bytes=80 + 90)
    assert costs["I", 1] == StageCost(40, 60, 0, 88, 8, working_bytes=80 + 90)
    assert costs["W", 1] == StageCost(50, 60, 70, 88, 0, working_bytes=80 + 90)
    # nothing is before layer 0
    assert costs["B", 0] == StageCost(2, 6, 7, 8, 0, working_bytes=8 + 9)


@given(st.data(), st.integers(1, 7))
def test_a_layer_counts_once_in_each_direction_whatever_the_plan(data, num_layers):
    layers = data.draw(strategies.layer_costs(st.just(num_layers)))
    plan = data.draw(strategies.plans(num_layers) | st.sampled_from(strategies.every_symmetric_plan(num_layers)))
    costs = stage_costs(plan, layers)
    turn = num_layers if plan.fused is None else plan.fused.start
    for kind, field in (("F", "forward"), ("B", "backward"), ("I", "input_gradient"), ("W", "weight_gradient")):
        total = sum(cost.time for (found, _), cost in costs.items() if found == kind)
        assert total == sum(getattr(layer, field) for layer in layers[:turn])
    assert sum(cost.gradient_bytes for (kind, _), cost in costs.items() if kind in "XB") == sum(
        layer.gradient_bytes for layer in layers
    )
    # what stages read was handed over by others: inputs once forward, cotangents once backward
    outputs = {span.stop for span in plan.forward if span.stop < num_layers}
    kept = {span.start for span in (*plan.forward, *plan.backward, plan.fused) if span is not None and span.start}
    handed = sum(cost.output_bytes for (kind, _), cost in costs.items() if kind == "F")
    assert handed == sum(layers[layer - 1].output_bytes for layer in outputs | kept)


def test_a_model_that_is_not_trained_has_forward_stages_alone():
    costs = stage_costs(Plan.parse("F0:1 F1:3"), LAYERS)
    assert list(costs) == [("F", 0), ("F", 1)]
    assert costs["F", 1] == StageCost(110, 660, 0, 8, 0, working_bytes=800)


def test_costs_of_another_model_are_refused():
    with pytest.raises(PlanError, match="the model has 3 layers"):
        stage_costs(Plan.parse("F0:1 X1:2 B0:1"), LAYERS)


def test_uniform_costs_split_backward_in_halves():
    costs = uniform_costs(Plan.parse("F0:1 X1:2 B0:1"), forward=2.0, backward=5.0)
    assert {key: cost.time for key, cost in costs.items()} == {
        ("F", 0): 2.0, ("X", 1): 5.0, ("B", 0): 5.0, ("I", 0): 2.5, ("W", 0): 2.5,
    }  # fmt: skip


def test_a_backward_pass_takes_three_forwards_and_its_halves_make_it_up():
    cost = LayerCost.of_forward(2.0, parameter_bytes=7)
    assert cost == LayerCost(2.0, 6.0, 6.0, 4.0, 2.0, parameter_bytes=7)


def test_numbers_are_forward_times_and_costs_stay():
    assert layer_costs([1.0, LAYERS[2]]) == [LayerCost.of_forward(1.0), LAYERS[2]]


def test_every_number_that_means_nothing_is_named():
    with pytest.raises(PlanError) as caught:
        LayerCost(1, -1, float("inf"), 1, 1, residual_bytes=float("nan"))
    assert str(caught.value) == (
        "cost: 3 problems\n"
        "  - backward is -1, it must be at least 0 and finite\n"
        "  - fused is inf, it must be at least 0 and finite\n"
        "  - residual_bytes is nan, it must be at least 0 and finite"
    )


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint64, np.float32])
def test_numbers_of_few_bits_add_up_as_they_should(kind):
    """numpy's own sums wrap round."""
    layers = [LayerCost.of_forward(1.0, parameter_bytes=kind(2**30), gradient_bytes=kind(2**30))] * 8
    plan = Plan.parse("X0:8")
    assert stage_costs(plan, layers)["X", 0].parameter_bytes == 2**33
    large = kind(min(4 * 10**18, np.iinfo(kind).max) if np.issubdtype(kind, np.integer) else 2**100)
    schedule = Schedule.parse("0F0 0F1 0F2 0F3")
    found = simulate(schedule, {("F", 0): StageCost(large)}, work=Workload([("F", 0)], 4))
    assert found.makespan_s == pytest.approx(4 * int(large))
    with pytest.raises(PlanError, match=str(3 * 2**30)):
        partition(layers, 2, 2, memory=float(2**30))
