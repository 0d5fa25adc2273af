import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpfunc.plan import (
    DECODERS,
    Hardware,
    LayerCost,
    Machine,
    Plan,
    Roofline,
    StageCost,
    decoder_roofline,
    roofline,
    roofline_table,
)
from rpfunc.plan.roofline import smallest_run
from rpfunc.schedule import Schedule, simulate

RATES = st.integers(1, 9)


@given(st.builds(StageCost, *[st.integers(0, 40)] * 6), RATES, RATES)
def test_from_the_smallest_run_on_and_no_earlier_computation_takes_longest(cost, upload, download):
    found = smallest_run(cost, Hardware(upload=upload, download=download))

    def hides(run):
        moved = (cost.parameter_bytes + run * cost.input_bytes) / upload
        moved = max(moved, (cost.gradient_bytes + run * cost.output_bytes) / download)
        return moved <= run * cost.time * (1 + 1e-12)

    assert [hides(run) for run in range(1, 60)] == [run >= found for run in range(1, 60)]


def test_workers_share_what_the_host_has():
    cost = StageCost(1.0, parameter_bytes=80.0, gradient_bytes=40.0)
    assert smallest_run(cost, Hardware(upload=8.0, download=8.0)) == 10
    assert smallest_run(cost, Hardware(upload=8.0, download=8.0, host_upload=8.0), num_workers=4) == 40
    assert smallest_run(cost, Hardware(upload=8.0, download=8.0, host_download=1.0)) == 40


def test_activations_that_take_longer_than_their_computation_never_hide():
    assert smallest_run(StageCost(1.0, input_bytes=9.0), Hardware(upload=8.0)) == math.inf
    assert smallest_run(StageCost(1.0, output_bytes=8.0), Hardware(download=8.0)) == 1


def test_each_kind_of_slot_counts_for_the_layer_that_needs_most():
    hardware = Hardware(upload=10.0, download=10.0)
    look_up = LayerCost.of_forward(0.0, parameter_bytes=1e9, gradient_bytes=1e9)
    layers = [LayerCost.of_forward(1.0, parameter_bytes=size, gradient_bytes=size) for size in (50.0, 120.0)]
    head = LayerCost.of_forward(2.0, parameter_bytes=300.0, gradient_bytes=300.0)
    found = roofline([look_up, *layers, head], hardware)
    assert found == Roofline(forward=12, fused=5, backward=4)
    assert found.run == 12


def test_a_run_of_that_size_never_waits_in_the_simulator():
    """One stage again and again on one worker: from there on a second run starts when the first has ended."""
    cost = StageCost(1.0, parameter_bytes=50.0)
    hardware = Hardware(upload=10.0)
    assert smallest_run(cost, hardware) == 5
    for run, waits in ((4, 1.0), (5, 0.0), (6, 0.0)):
        schedule = Schedule.parse(" ".join(f"{stage}F{m}" for stage in (0, 1) for m in range(run)))
        timeline = simulate(schedule, {("F", 0): cost, ("F", 1): cost}, hardware)
        ends = {str(event.task): event.end_s for event in timeline.events if event.channel == "compute"}
        assert ends[f"1F{run - 1}"] - ends[f"0F{run - 1}"] == run * 1.0 + waits


def test_a_few_sequences_hide_dense_models_and_experts_take_many():
    """Sequences of 2,048 rows. RoundPipe (arXiv 2604.27085) states a few for dense models, at least 80 for experts."""
    table = {(model, name): found.run for model, name, found in roofline_table(DECODERS, ["8x4090", "8xa800"])}
    for model in ("qwen3-1.7b", "llama-3.1-8b", "qwen3-32b"):
        assert 2 <= table[model, "8x4090"] <= 3
        assert 4 <= table[model, "8xa800"] <= 5
    assert (table["gpt-oss-20b", "8x4090"], table["gpt-oss-20b", "8xa800"]) == (14, 28)
    assert (table["qwen3-235b-a22b", "8x4090"], table["qwen3-235b-a22b", "8xa800"]) == (22, 43)
    assert len(table) == 10


def test_a_decoder_on_a_machine_by_hand():
    """LLaMA-3.1-8B: 218e6 numbers a layer, 0.93e12 FLOPs for 2,048 rows, 16.8e6 bytes each way."""
    shape = DECODERS[1]
    found = decoder_roofline(shape, Machine(1, Hardware(upload=32e9, download=32e9), 100e12))
    forward_s = 2 * 2048 * 226.5e6 / 100e12
    activations_s = 2048 * 4096 * 2 / 32e9
    assert found.forward == math.ceil(436.2e6 / 32e9 / (forward_s - activations_s)) == 2
    assert found.backward == math.ceil(436.2e6 / 32e9 / (3 * forward_s - 2 * activations_s)) == 1


@pytest.mark.parametrize("plan", ["X0:1"])
def test_a_single_layer_is_fused(plan):
    assert roofline([LayerCost.of_forward(1.0, parameter_bytes=9.0)], Hardware(upload=1.0)) == Roofline(0, 3, 0)
    assert str(Plan.single(1)) == plan
