"""The fastest contiguous partition against all partitions, timed by the simulator; and the quick clock against it."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc.plan import Hardware, LayerCost, Plan, stage_costs
from rpfunc.plan.contiguous import Pipeline, fastest_plans
from rpfunc.plan.hardware import COMPUTE_ONLY
from rpfunc.plan.timing import makespans, order_of, slot_times
from rpfunc.schedule import Workload, gpipe, halve, interleaved, looped_bfs, one_f_one_b, simulate, zb_h1, zb_v

STAGES = {gpipe: 1, one_f_one_b: 1, interleaved: 2, looped_bfs: 2, zb_h1: 1, zb_v: 2}
"""How many each worker has here."""

generators, workers, microbatches = st.sampled_from(list(STAGES)), st.integers(1, 3), st.integers(1, 6)


def generate(generator):
    return lambda work, n: (generator(work, n), halve(work) if generator in (zb_h1, zb_v) else work)


def simulated(generator, plan, layers, num_workers, num_microbatches, hardware=COMPUTE_ONLY, *, resident=False):
    schedule, work = generate(generator)(Workload(plan.slots, num_microbatches), num_workers)
    return simulate(schedule, stage_costs(plan, layers), hardware, work, resident=resident).makespan_s


@st.composite
def models(draw, least, most):
    forward = draw(st.lists(st.integers(0, 4), min_size=least, max_size=most))
    size = st.integers(0, 3)
    return [
        LayerCost.of_forward(time, parameter_bytes=draw(size), gradient_bytes=draw(size), output_bytes=draw(size))
        for time in forward
    ]


@settings(max_examples=max(10, settings.default.max_examples // 3))
@given(st.data(), generators, workers, microbatches)
def test_no_partition_is_faster_by_more_than_a_fiftieth(data, generator, num_workers, num_microbatches):
    stages = STAGES[generator] * num_workers
    layers = data.draw(models(stages, 6))
    pipeline = Pipeline(generate(generator), stages, num_workers, num_microbatches)
    plans = [Plan.symmetric(len(layers), [0, *cuts]) for cuts in combinations(range(1, len(layers)), stages - 1)]
    best = min(simulated(generator, plan, layers, num_workers, num_microbatches) for plan in plans)
    found = fastest_plans(layers, [pipeline])[0]
    assert simulated(generator, found.plan, layers, num_workers, num_microbatches) == pytest.approx(found.time)
    assert best * (1 - 1e-9) <= found.time <= best * 1.02


@given(st.data(), generators, workers, microbatches, st.booleans(), st.integers(1, 3))
def test_the_quick_clock_is_the_simulator_with_a_link_for_each_transfer(
    data, generator, num_workers, num_microbatches, resident, prefetch
):
    """Exact without transfers, and with them never later, as transfers on one link wait for each other."""
    stages = STAGES[generator] * num_workers
    layers = data.draw(models(stages, 8))
    starts = sorted(data.draw(st.permutations(range(1, len(layers))))[: stages - 1])
    plan, cuts = Plan.symmetric(len(layers), [0, *starts]), np.array([[0, *starts, len(layers)]] * 2)
    work = Workload(plan.slots, num_microbatches)
    for hardware in (COMPUTE_ONLY, Hardware(upload=2.0, download=1.0, latency=0.5, prefetch=prefetch)):
        order = order_of(*generate(generator)(work, num_workers), hardware)
        quick = makespans(order, slot_times(order, layers, cuts, hardware, num_workers, resident=resident))
        exact = simulated(generator, plan, layers, num_workers, num_microbatches, hardware, resident=resident)
        if hardware is COMPUTE_ONLY:
            assert quick == pytest.approx([exact] * 2)
        else:
            assert (quick <= exact * (1 + 1e-9)).all()


def test_it_beats_balanced_stages_where_the_ends_of_the_pipeline_decide():
    """With one microbatch a stage each, the fastest number of stages is found among several."""
    layers = [LayerCost.of_forward(0.0), *[LayerCost.of_forward(1.0)] * 12, LayerCost.of_forward(3.0)]
    pipelines = [Pipeline(generate(interleaved), stages, 2, 4) for stages in (4, 6, 8)]
    found = fastest_plans(layers, pipelines)
    assert [candidate.time for candidate in found] == sorted(candidate.time for candidate in found)
    assert found[0].time < min(
        simulated(interleaved, plan, layers, 2, 4)
        for plan in (Plan.symmetric(14, [0, 4, 8, 11]), Plan.symmetric(14, [0, 3, 6, 8, 10, 12]))
    )
