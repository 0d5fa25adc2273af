"""Plans made under a limit keep it in the simulator, and the limit that an error advises does."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc.errors import PlanError
from rpfunc.plan import (
    Ahead,
    Hardware,
    LayerCost,
    StageCost,
    decoder_costs,
    decoder_shape,
    joint_costs,
    joint_slots,
    machine,
    partition,
    partition_jointly,
    stage_costs,
    worker_bytes,
)
from rpfunc.plan.deal import Deal
from rpfunc.plan.held import most_worker_bytes
from rpfunc.plan.search import search
from rpfunc.schedule import Workload, report, round_robin, simulate
from rpfunc.testing import strategies

FEWER = settings(max_examples=max(10, settings.default.max_examples // 3))
SLOW = st.sampled_from([0.5, 2.0, 7.0, float("inf")])


def in_advance(plan, memory):
    """Returns plan(memory) and memory; if that is too little, the memory that the error advises, which must do."""
    try:
        return plan(memory), memory
    except PlanError as error:
        advised = int(re.search(r"bytes a worker, (\d+) would do", str(error))[1])
        assert advised > memory
        return plan(advised), advised


def peak(schedule, costs, hardware, work):
    return max(report(simulate(schedule, costs, hardware, work), schedule, costs, hardware, work).peak_bytes)


def that_keeps_up(slots, microbatches, upload, factor):
    """Hardware that downloads outputs within a microbatch, and gradients, with all outputs, within a run."""
    quickest = min(slot.time for slot in slots)
    outputs, gradients = max(slot.output_bytes for slot in slots), max(slot.gradient_bytes for slot in slots)
    needed = (outputs * (microbatches + 1) + gradients) / (microbatches * quickest)
    return Hardware(upload=upload, host_upload=2 * upload, download=max(needed, 1e-9) * factor)


def timed(layers):
    """Layers that all take some time."""
    return [replace(layer, **{name: 1 + getattr(layer, name) for name in list(vars(layer))[:5]}) for layer in layers]


drawn_layers = strategies.layer_costs(st.integers(1, 6)).map(timed)


@given(st.data(), drawn_layers, st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 300))
def test_what_partition_finds_keeps_the_memory(data, layers, workers, microbatches, num_iterations, memory):
    joined = num_iterations > 1
    plan, memory = in_advance(
        lambda limit: partition(layers, workers, microbatches, memory=limit, joined=joined), memory
    )
    costs = stage_costs(plan, layers)
    slots = [costs[slot] for slot in plan.slots]
    hardware = that_keeps_up(slots, microbatches, data.draw(SLOW), data.draw(st.sampled_from([1.0, 3.0])))
    work = Workload(plan.slots, microbatches, num_iterations=num_iterations, staleness=data.draw(st.integers(0, 1)))
    schedule = round_robin(work, workers)
    assert peak(schedule, costs, hardware, work) <= memory
    assert peak(schedule, costs, Hardware(), work) <= memory


@given(
    st.lists(st.tuples(drawn_layers, st.booleans()), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 300),
    SLOW,
)
def test_what_partition_finds_for_several_models_keeps_the_memory(models, workers, memory, upload):
    layers, trained = zip(*models, strict=True)
    plans, memory = in_advance(lambda limit: partition_jointly(layers, workers, trained, memory=limit), memory)
    slots, costs = joint_slots(plans), joint_costs(plans, layers)
    work = Workload(slots, 3)
    hardware = that_keeps_up([costs[slot] for slot in slots], 3, upload, 1.0)
    assert peak(round_robin(work, workers), costs, hardware, work) <= memory


@FEWER
@given(st.data(), strategies.layer_costs(st.integers(1, 5)), st.integers(1, 4), st.integers(1, 4), st.integers(0, 300))
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_what_search_finds_keeps_the_memory_on_links_however_slow(
    joined, split, data, layers, workers, microbatches, memory
):
    """Also if layers take no time, downloads pile up, and uploads are far ahead."""
    hardware = Hardware(
        upload=data.draw(SLOW), download=data.draw(SLOW), host_download=data.draw(SLOW),
        latency=data.draw(st.sampled_from([0.0, 3.0])), prefetch=data.draw(st.integers(1, 3)),
        prefetch_runs=data.draw(st.integers(1, 3)),
    )  # fmt: skip
    least, staleness = data.draw(st.integers(1, 12)), int(joined)

    def find(limit):
        on = replace(hardware, memory_bytes=limit)
        return search(
            layers, workers, microbatches, on, staleness=staleness, least_slots=least, joined=joined, split=split
        ).deal

    deal, memory = in_advance(find, max(memory, 0.5))
    work = deal.workload(microbatches, num_iterations=4 if joined else 1, staleness=staleness)
    costs = stage_costs(deal.plan, layers)
    assert peak(deal.schedule(work, workers), costs, hardware, work) <= memory


@given(st.data(), drawn_layers, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(1, 3), SLOW)
def test_no_worker_has_more_than_its_cards_are_said_to_hold(data, layers, workers, microbatches, joined, runs, upload):
    """However slots are cut and dealt, and however far uploads are ahead."""
    plan = data.draw(strategies.plans(len(layers)))
    deal = Deal(plan, tuple(data.draw(st.integers(1, microbatches)) for _ in plan.slots))
    ahead = Ahead(data.draw(st.integers(1, 3)), runs)
    costs = stage_costs(plan, layers)
    slots = [costs[slot] for slot in plan.slots]
    bound = worker_bytes(slots, workers, deal.ways, joined=joined, ahead=ahead).max()
    assert bound <= most_worker_bytes(slots, ahead)
    work = deal.workload(microbatches, num_iterations=3 if joined else 1, staleness=int(joined))
    quick = that_keeps_up(slots, 1, upload, 1.0)
    hardware = replace(quick, prefetch=ahead.prefetch, prefetch_runs=ahead.prefetch_runs)
    assert peak(deal.schedule(work, workers), costs, hardware, work) <= bound


@pytest.mark.parametrize("memory", [1.0e9, 3.8e9, 4.25e9, 6e9])
def test_decoders_on_consumer_cards_keep_the_memory(memory):
    found = machine("8x4090")
    layers = decoder_costs(decoder_shape("llama-3.1-8b"), 2048, flops_per_s=found.flops_per_s)
    plan, limit = in_advance(lambda limit: partition(layers, 8, 16, memory=limit), memory)
    work = Workload(plan.slots, 16)
    assert peak(round_robin(work, 8), stage_costs(plan, layers), found.hardware, work) <= limit
    for split in (False, True):
        on = replace(found.hardware, memory_bytes=limit)
        deal = search(layers, 8, 16, on, split=split).deal
        work = deal.workload(16)
        assert peak(deal.schedule(work, 8), stage_costs(deal.plan, layers), on, work) <= limit


def test_a_bound_is_nearly_reached():
    """Slots alike: two of parameters, two of gradients; two inputs and outputs, the latter a microbatch late."""
    layers = [LayerCost.of_forward(1.0, parameter_bytes=100, gradient_bytes=50, output_bytes=3)] * 9
    plan = partition(layers, 2, memory=400)
    costs, work = stage_costs(plan, layers), Workload(plan.slots, 4)
    slots = [costs[slot] for slot in plan.slots]
    hardware = that_keeps_up(slots, 4, 30.0, 1.0)
    bound = worker_bytes(slots, 2).max()
    assert 0.95 * bound <= peak(round_robin(work, 2), costs, hardware, work) <= bound <= 400


def test_links_that_fall_behind_are_told_from_layers_too_large():
    layers = [LayerCost.of_forward(0.0, gradient_bytes=10.0)] * 4
    with pytest.raises(PlanError) as caught:
        search(layers, 1, 1, Hardware(download=1e-3, memory_bytes=25.0), least_slots=9)
    assert str(caught.value) == (
        "search: memory is 25 bytes a worker, 40 would do: "
        "the smallest slots take 40, since transfers fall behind computation"
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 3), st.booleans())
def test_more_workers_than_cards_hold_what_those_do_that_come_round_alike(sizes, rounds, joined):
    slots = [StageCost(1, parameter_bytes=size, gradient_bytes=size) for size in sizes]
    enormous = 10**18 - rounds
    alike = enormous % len(slots) + len(slots) if joined else len(slots)
    assert (worker_bytes(slots, enormous, joined=joined) == worker_bytes(slots, alike, joined=joined)).all()


def test_cards_that_cannot_be_are_refused():
    with pytest.raises(PlanError) as caught:
        worker_bytes([], 0, [1])
    assert str(caught.value) == (
        "worker_bytes: 3 problems\n"
        "  - workers is 0, it must be at least 1\n"
        "  - has no slot, needs at least one\n"
        "  - ways has 1 numbers, there are 0 slots"
    )


@pytest.mark.parametrize("memory", [-1, float("nan"), "7"])
def test_memory_that_means_nothing_is_refused(memory):
    with pytest.raises(PlanError, match=r"^partition: memory is .*, it must be at least 0 and finite$"):
        partition([1.0], 2, memory=memory)


def test_layers_without_bytes_need_no_memory():
    assert partition([0.0] * 4, 3, memory=0) == partition([0.0] * 4, 3) == partition([0.0] * 4, 3, memory=float("inf"))


def test_hardware_that_uploads_without_end_ahead_ends():
    layers = [LayerCost.of_forward(1.0, parameter_bytes=3.0, output_bytes=1.0)] * 5
    hardware = Hardware(upload=1.0, prefetch=10**18, prefetch_runs=10**18, memory_bytes=600.0)
    assert search(layers, 3, 4, hardware).deal.plan.num_layers == 5
