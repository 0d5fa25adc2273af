"""Classic pipelines side by side: the best plan that fits, made again by the public functions."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rpfunc.plan import (
    COMPUTE_ONLY,
    Hardware,
    LayerCost,
    Plan,
    classic_partition,
    decoder_costs,
    decoder_shape,
    machine,
)
from rpfunc.plan.compare import DEALT, RESIDENT, SCHEDULES, compare
from rpfunc.plan.costs import stage_costs
from rpfunc.plan.footprint import busiest_moments, resident_bytes
from rpfunc.schedule import (
    Workload,
    gpipe,
    halve,
    interleaved,
    looped_bfs,
    one_f_one_b,
    report,
    simulate,
    validate,
    zb_h1,
    zb_v,
)

GENERATORS = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "looped_bfs": looped_bfs,
}


def by_hand(name, plan, layers, num_workers, num_microbatches, hardware):
    work, costs = Workload(plan.slots, num_microbatches), stage_costs(plan, layers)
    schedule = GENERATORS[name](work, num_workers)
    work = halve(work) if name.startswith("zb") else work
    timeline = simulate(schedule, costs, hardware, work, resident=name in RESIDENT)
    return report(timeline, schedule, costs, hardware, work)


def counts(name, num_workers, num_layers):
    if name == "looped_bfs":
        return sorted({*range(num_workers, num_layers + 1, num_workers), num_layers})
    times = {"interleaved": range(2, 13), "zb_v": [2]}.get(name, [1])
    return [num_workers * each for each in times if num_workers * each <= num_layers]


@pytest.mark.parametrize("hardware", [COMPUTE_ONLY, machine("4x4090").hardware])
def test_the_figures_are_those_of_the_public_functions(hardware):
    layers = decoder_costs(decoder_shape("qwen3-1.7b"), 2048, flops_per_s=1e14)
    for row in compare(layers, 4, 6, hardware):
        assert row.report == report(row.timeline, row.schedule, row.costs, hardware, row.work)
        assert row.costs == stage_costs(row.plan, layers)
        validate(row.schedule, row.work)
        again = simulate(row.schedule, row.costs, hardware, row.work, resident=row.name in RESIDENT)
        assert again == row.timeline
        if row.name not in DEALT:
            assert by_hand(row.name, row.plan, layers, 4, 6, hardware) == row.report
    assert {*GENERATORS} | {*DEALT} == {*SCHEDULES}


@st.composite
def models(draw, least):
    size = st.integers(0, 5)
    return [
        LayerCost(draw(st.integers(1, 4)), *draw(st.tuples(*[st.integers(1, 6)] * 4)), *draw(st.tuples(*[size] * 4)))
        for _ in range(draw(st.integers(least, 6)))
    ]


@settings(max_examples=max(10, settings.default.max_examples // 3), deadline=None)
@given(st.data(), st.sampled_from(list(GENERATORS)), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_what_fits_is_preferred_to_what_is_fast(data, name, num_workers, num_microbatches, transfers):
    """Against all partitions of small models: one is shown that fits if any does, and about the fastest of those."""
    least = counts(name, num_workers, 99)[0]
    layers = data.draw(models(least))
    hardware = Hardware(upload=4, download=4) if transfers else COMPUTE_ONLY
    every = [
        Plan.symmetric(len(layers), [0, *cuts])
        for stages in counts(name, num_workers, len(layers))
        for cuts in combinations(range(1, len(layers)), stages - 1)
    ]
    figures = [by_hand(name, plan, layers, num_workers, num_microbatches, hardware) for plan in every]
    peaks = sorted({max(each.peak_bytes) for each in figures})
    limit = max(1, data.draw(st.sampled_from([0, *peaks])))
    limited = replace(hardware, memory_bytes=limit)
    (row,) = compare(layers, num_workers, num_microbatches, limited, [name])
    fitting = [each.makespan for each in figures if max(each.peak_bytes) <= limit]
    if fitting:
        assert not row.report.over_memory
        assert min(fitting) * (1 - 1e-9) <= row.report.makespan <= min(fitting) * 1.05
    else:
        assert row.report.over_memory
        assert row.report.makespan <= 1.05 * min(each.makespan for each in figures)


@given(st.data(), st.sampled_from(RESIDENT), st.integers(1, 3), st.integers(1, 5))
def test_what_a_resident_schedule_keeps_is_estimated_from_below(data, name, num_workers, num_microbatches):
    """Exactly where nothing waits for its reader on the same worker."""
    stages = counts(name, num_workers, 99)[0]
    layers = data.draw(models(stages))
    plan = classic_partition(layers, stages, num_workers)
    schedule = GENERATORS[name](Workload(plan.slots, num_microbatches), num_workers)
    cuts = np.array([[*(span.start for span in plan.forward), len(layers)]])
    (found,) = resident_bytes(busiest_moments(schedule), layers, cuts)
    exact = max(by_hand(name, plan, layers, num_workers, num_microbatches, COMPUTE_ONLY).peak_bytes)
    assert found <= exact
    if name in ("gpipe", "one_f_one_b") and num_workers > 1:
        assert found == exact


def test_a_looped_plan_that_fits_is_found():
    """47 stages of two layers are faster, and need twice the memory of a worker; 96 of one layer fit."""
    found = machine("8x4090")
    layers = decoder_costs(decoder_shape("qwen3-235b-a22b"), 2048, 2, flops_per_s=found.flops_per_s)
    (row,) = compare(layers, 8, 4, found.hardware, ["looped_bfs"])
    assert row.report.over_memory == ()
    assert max(row.report.peak_bytes) < 24e9


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_looped_partitions_have_any_number_of_stages(workers, more, data):
    layers = data.draw(st.lists(st.integers(1, 5), min_size=more, max_size=12))
    stages = data.draw(st.integers(1, len(layers)))
    plan = classic_partition(layers, stages, workers)
    assume(len(plan.forward) == stages)
    plan.check(len(layers))
    work = Workload(plan.slots, 2)
    validate(looped_bfs(work, workers), work)
