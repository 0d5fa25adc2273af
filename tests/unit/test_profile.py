from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import value_and_grad
from rpfunc.errors import PlanError
from rpfunc.plan import LayerCost, Plan, drift, load_costs, profile_costs, save_costs, stage_costs
from rpfunc.schedule import Event, Task, Timeline, Workload, halve, round_robin, simulate, zb_h1
from rpfunc.testing import exact, strategies

ONE_EACH = Plan.cut(4, range(4), range(4))


def run(plan, layers, microbatches=3, workers=2):
    work = Workload(plan.slots, microbatches)
    return simulate(round_robin(work, workers), stage_costs(plan, layers), work=work)


@given(strategies.layer_costs(st.just(4)))
def test_what_ran_is_what_is_measured(layers):
    found = profile_costs(run(ONE_EACH, layers), ONE_EACH)
    assert [cost.forward for cost in found[:3]] == [layer.forward for layer in layers[:3]]
    assert [cost.backward for cost in found[:3]] == [layer.backward for layer in layers[:3]]
    assert found[3].fused == layers[3].fused


def test_what_did_not_run_is_told_by_what_did():
    layers = [LayerCost(2, 7, 99, 99, 99)] * 3 + [LayerCost(99, 99, 12, 99, 99)]
    found = profile_costs(run(ONE_EACH, layers), ONE_EACH)
    assert found[0] == LayerCost(2, 7, 7, 7, 7)
    assert found[3] == LayerCost(4, 12, 12, 12, 12)


@pytest.mark.parametrize(
    ("events", "wanted"),
    [
        ([("0F0", 1), ("0I0", 4), ("0W0", 2)], LayerCost(1, 4, 4, 4, 2)),
        ([("0F0", 1), ("0I0", 4), ("0W0", 5)], LayerCost(1, 5, 5, 4, 5)),
        ([("0F0", 1), ("0B1", 9), ("0I0", 4), ("0W0", 5)], LayerCost(1, 9, 9, 4, 5)),
        ([("0F0", 1), ("0I0", 4)], LayerCost(1, 4, 4, 4, 4)),
        ([("0F0", 1), ("0B0", 3)], LayerCost(1, 3, 3, 3, 3)),
    ],
)
def test_each_half_runs_the_whole_backward(events, wanted):
    timeline = Timeline(tuple(Event(0, "compute", Task.parse(text), 0, took) for text, took in events), 1)
    assert profile_costs(timeline, Plan.symmetric(1, [0])) == [wanted]


def test_a_run_in_halves_is_predicted_as_it_was():
    """Each half takes 5, as the runtime's do; the profile's I and W are those, and not a share of their sum."""
    plan, layers = Plan.symmetric(2, [0, 1]), [LayerCost(2, 5, 5, 5, 5)] * 2
    work = halve(Workload(plan.slots, 4))
    schedule = zb_h1(work, 2)
    ran = simulate(schedule, stage_costs(plan, layers), work=work)
    assert simulate(schedule, stage_costs(plan, profile_costs(ran, plan)), work=work) == ran


def test_a_layer_that_only_ran_forward_is_taken_to_need_three_times_that_backward():
    timeline = Timeline((Event(0, "compute", Task.parse("0F0"), 0, 2.0),), 1)
    assert profile_costs(timeline, Plan.parse("F0:1")) == [LayerCost(2, 6, 6, 6, 6)]


def test_an_odd_microbatch_and_transfers_change_nothing():
    timeline = run(ONE_EACH, [LayerCost.of_forward(1.0)] * 4)
    slow = {Task.parse("0F0"), Task.parse("3X1")}
    events = [event._replace(end_s=event.end_s + 50 * (event.task in slow)) for event in timeline.events]
    events += [event._replace(channel="activation_upload", end_s=999.0) for event in timeline.events]
    assert profile_costs(replace(timeline, events=tuple(events)), ONE_EACH) == profile_costs(timeline, ONE_EACH)


def test_sizes_are_taken_over():
    sizes = [LayerCost.of_forward(9.0, parameter_bytes=index, output_bytes=7) for index in range(4)]
    found = profile_costs(run(ONE_EACH, [LayerCost.of_forward(1.0)] * 4), ONE_EACH, sizes)
    assert found == [LayerCost(1, 3, 3, 3, 3, parameter_bytes=index, output_bytes=7) for index in range(4)]


def test_a_real_run_is_measured():
    plan = Plan.cut(4, range(4), range(4))
    function = value_and_grad(exact.model(), exact.linear(), plan=plan, workers=2, microbatches=3)
    timeline = function(exact.init(), exact.batch(3, 2))[0].timeline
    costs = profile_costs(timeline, plan)
    assert len(costs) == 4
    assert all(cost.forward > 0 and cost.backward > 0 for cost in costs)
    assert drift(costs, timeline, plan) < 1e-9


def test_stages_of_several_layers_are_refused():
    plan = Plan.parse("F0:2 X2:4 B0:1 B1:2")
    with pytest.raises(PlanError) as caught:
        profile_costs(run(plan, [LayerCost.of_forward(1.0)] * 4), plan, sizes=[LayerCost.of_forward(1.0)])
    assert str(caught.value) == (
        "profile of plan 'F0:2 X2:4 B0:1 B1:2': 3 problems\n"
        "  - stage 0F has layers 0:2, it must have one\n"
        "  - stage 1X has layers 2:4, it must have one\n"
        "  - sizes are of 1 layers, the plan has 4"
    )


def test_layers_that_never_ran_are_named():
    with pytest.raises(PlanError) as caught:
        profile_costs(Timeline((), 1), Plan.parse("F0:1 X1:2 B0:1"))
    assert str(caught.value) == (
        "profile of plan 'F0:1 X1:2 B0:1': 2 problems\n"
        "  - layer 0 ran neither forward nor fused\n"
        "  - layer 1 ran neither forward nor fused"
    )


PLAN = Plan.parse("F0:3 X3:4 B0:1 B1:3")
LAYERS = [LayerCost.of_forward(1.0)] * 4


@given(st.integers(1, 100))
def test_a_machine_that_is_slower_as_a_whole_has_not_drifted(factor):
    slower = [LayerCost.of_forward(factor / 7)] * 4
    assert drift(LAYERS, run(PLAN, slower), PLAN) == pytest.approx(0.0, abs=1e-12)


def test_drift_is_a_share_of_the_slowest_slot():
    """Predicted 3 3 3 6; measured 3 12 3 6, which the prediction is scaled to by 24 / 15."""
    measured = [*LAYERS[:3], replace(LAYERS[3], fused=12.0)]
    assert drift(LAYERS, run(PLAN, measured), PLAN) == pytest.approx((12 * 15 / 24 - 3) / 6)


def test_nothing_predicted_or_measured_is_no_drift():
    nothing = [LayerCost.of_forward(0.0)] * 4
    assert drift(nothing, run(PLAN, nothing), PLAN) == 0.0
    assert drift(LAYERS, run(PLAN, nothing), PLAN) == 0.0
    assert drift(LAYERS, Timeline((), 1), PLAN) == 0.0


def test_a_timeline_of_another_plan_is_refused():
    other = Plan.parse("F0:1 F1:3 X3:4 B0:3")
    with pytest.raises(PlanError) as caught:
        drift(LAYERS, run(other, LAYERS), PLAN)
    assert str(caught.value) == (
        "drift: the timeline is of another plan than 'F0:3 X3:4 B0:1 B1:3': 2 problems\n"
        "  - ran stage 1F\n"
        "  - ran stage 2X"
    )


@given(st.lists(st.builds(LayerCost, *[st.just(0.0) | st.floats(1e-100, 1e100)] * 9), max_size=4))
def test_costs_survive_a_file(tmp_path_factory, layers):
    path = tmp_path_factory.mktemp("profile") / "costs.json"
    save_costs(path, layers)
    assert load_costs(path) == layers
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


def test_sizes_may_be_left_out(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('[{"forward": 1, "backward": 3, "fused": 3, "input_gradient": 2, "weight_gradient": 1}]')
    assert load_costs(path) == [LayerCost.of_forward(1.0)]


def test_fields_that_are_unknown_or_missing_are_named(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(
        '[{"forward": 1, "backward": 3, "fused": 3, "input_gradient": 2},'
        ' {"forwards": 1, "forward": 1, "backward": 3, "fused": 3, "input_gradient": 2, "weight_gradient": 1}]'
    )
    with pytest.raises(PlanError) as caught:
        load_costs(path)
    assert str(caught.value) == (
        f"costs in {path}: 2 problems\n"
        "  - layer 0 lacks 'weight_gradient'\n"
        "  - layer 1 has the unknown field 'forwards'"
    )


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"forward": null}]', '[{"forward": "1"}]'])
def test_files_that_hold_no_costs_are_refused(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(PlanError, match="needs a list of layers, each an object of numbers"):
        load_costs(path)


def test_numbers_that_mean_nothing_are_refused(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('[{"forward": -1, "backward": 3, "fused": 3, "input_gradient": 2, "weight_gradient": 1}]')
    with pytest.raises(PlanError, match=r"forward is -1\.0, it must be at least 0 and finite"):
        load_costs(path)
