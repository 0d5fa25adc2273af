"""Schedules that keep their stages on a worker: what moves, counted by hand and by following every byte."""

import sys
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.random_schedules import Case, bound_cases

from rpfunc import Plan
from rpfunc.errors import ScheduleError
from rpfunc.plan import Hardware, LayerCost, StageCost, classic_partition, decoder_costs, decoder_shape, machine
from rpfunc.plan.costs import stage_costs
from rpfunc.schedule import (
    Schedule,
    Workload,
    gpipe,
    halve,
    interleaved,
    looped_bfs,
    one_f_one_b,
    report,
    round_robin,
    simulate,
    steady_state,
    zb_h1,
    zb_v,
)
from rpfunc.schedule.resident import moved_costs

CLASSIC = {gpipe: 1, one_f_one_b: 1, zb_h1: 1, zb_v: 2, interleaved: 3, looped_bfs: 3}
"""Stages a worker."""


def reported(make, plan, layers, num_workers, num_microbatches, hardware):
    work = Workload(plan.slots, num_microbatches)
    schedule, costs = make(work, num_workers), stage_costs(plan, layers)
    work = halve(work) if make in (zb_h1, zb_v) else work
    return report(simulate(schedule, costs, hardware, work, resident=True), schedule, costs, hardware, work)


@pytest.mark.parametrize(
    ("make", "crossings"), [(gpipe, 7), (one_f_one_b, 7), (zb_h1, 7), (zb_v, 14), (interleaved, 23)]
)
def test_llama_moves_an_activation_and_a_cotangent_both_ways_at_each_crossing(make, crossings):
    """A boundary is 2048 rows of 4096 numbers of 2 bytes; zero-bubble schedules move no more than others."""
    machine_of_8 = machine("8x4090")
    layers = decoder_costs(decoder_shape("llama-3.1-8b"), 2048, flops_per_s=machine_of_8.flops_per_s)
    plan = classic_partition(layers, 8 * CLASSIC[make], 8)
    found = reported(make, plan, layers, 8, 16, machine_of_8.hardware)
    one_way = crossings * 16 * 2 * (2048 * 4096 * 2)
    assert (found.uploaded_bytes, found.downloaded_bytes) == (one_way, one_way)


@given(st.data(), st.sampled_from(list(CLASSIC)), st.integers(1, 4), st.integers(1, 6))
def test_what_moves_are_boundaries_between_workers(data, make, num_workers, num_microbatches):
    """No parameters or gradients; of each boundary whose two stages lie apart four transfers a microbatch."""
    num_stages = CLASSIC[make] * num_workers
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=num_stages, max_size=num_stages))
    layers = [LayerCost.of_forward(1, parameter_bytes=50, gradient_bytes=70, output_bytes=size) for size in sizes]
    plan = Plan.symmetric(num_stages, range(num_stages))
    found = reported(make, plan, layers, num_workers, num_microbatches, Hardware(upload=3))
    down, back = range(num_workers), range(num_workers)[::-1]
    homes = [*down, *back] if make is zb_v else [*down] * CLASSIC[make]
    crossed = sum(size for size, one, other in zip(sizes, homes, homes[1:], strict=False) if one != other)
    assert found.uploaded_bytes == found.downloaded_bytes == 2 * num_microbatches * crossed


@given(bound_cases())
def test_every_byte_is_where_it_is_read(case: Case):
    """Follows each microbatch: a worker uploads only what it neither made nor has, and sends what others read."""
    schedule, costs, hardware, work = case
    home = {stage: worker for worker, own in enumerate(schedule.workers) for stage, _, _ in own}
    slots = list(work.slots)
    moved = {}
    for (kind, stage), cost in costs.items():
        place = slots.index(("B" if kind in "IW" else kind, stage))
        before = slots[place - 1] if place else None
        after = slots[place + 1] if place + 1 < len(slots) else None
        missing = cost.input_bytes
        earlier = {"F": "", "X": "", "B": "F", "I": "F", "W": "FI"}[kind]
        missing -= max([costs[part, stage].input_bytes for part in earlier if (part, stage) in costs], default=0)
        if before is not None and home[before[1]] == home[stage]:
            parts = [(part, before[1]) for part in ("B", "I") if before[0] == "B"] or [before]
            missing -= min(costs[part].output_bytes for part in parts if part in costs)
        stays = after is not None and kind != "W" and home[after[1]] == home[stage]
        sent = 0 if stays else cost.output_bytes
        moved[kind, stage] = StageCost(cost.time, 0, 0, max(0, missing), sent, cost.working_bytes)
    found = simulate(*case, resident=True)
    assert found.events == simulate(schedule, moved, hardware, work).events
    assert found.resident
    figures = report(found, schedule, costs, hardware, work)
    ran = Counter((kind, stage) for stage, kind, _ in schedule.tasks)
    assert figures.uploaded_bytes == sum(moved[slot].input_bytes * count for slot, count in ran.items())
    assert figures.downloaded_bytes == sum(moved[slot].output_bytes * count for slot, count in ran.items())
    assert {event.channel for event in found.events}.isdisjoint({"parameter_upload", "gradient_download"})


def test_without_transfers_nothing_is_different_but_the_bytes():
    plan = Plan.symmetric(4, range(4))
    layers = [LayerCost.of_forward(1, parameter_bytes=5, output_bytes=3)] * 4
    work, costs = Workload(plan.slots, 6), stage_costs(plan, layers)
    schedule = one_f_one_b(work, 4)
    assert simulate(schedule, costs).events == simulate(schedule, costs, resident=True).events


def test_the_turn_of_a_v_is_held_until_it_is_read():
    """One worker has both stages of 10 bytes between: 4 outputs wait for their readers; nothing moves."""
    costs = {("F", 0): StageCost(1, output_bytes=10), ("F", 1): StageCost(1, input_bytes=10)}
    costs |= {("B", 1): StageCost(1, input_bytes=10, output_bytes=10), ("B", 0): StageCost(1, input_bytes=10)}
    schedule = Schedule.parse("0F0 0F1 0F2 0F3 1F0 1F1 1F2 1F3 1B0 0B0 1B1 0B1 1B2 0B2 1B3 0B3")
    work, hardware = Workload.of(schedule), Hardware(upload=1, download=1)
    found = report(simulate(schedule, costs, hardware, work, resident=True), schedule, costs, hardware, work)
    assert (found.makespan, found.uploaded_bytes, found.downloaded_bytes) == (16, 0, 0)
    assert found.peak_bytes == (50,)  # four inputs of 1F, and the cotangent of one


def test_a_steady_state_may_be_resident():
    """Alone each iteration would bring 8 bytes of parameters, at 1 a unit of time."""
    work = Workload([("F", 0), ("X", 1), ("B", 0)], 4, staleness=1)
    costs = {("F", 0): StageCost(1, 8), ("X", 1): StageCost(4, 8), ("B", 0): StageCost(2, 8)}

    def pipeline(longer):
        return Schedule((round_robin(longer, 1).workers[0],))

    found = steady_state(pipeline, work, costs, Hardware(upload=Fraction(1)), resident=True)
    assert (found.iteration_time, found.bubble) == (28, 0)
    assert steady_state(pipeline, work, costs, Hardware(upload=Fraction(1, 8))).iteration_time > 28


def test_stages_that_do_not_stay_are_refused_all_at_once():
    costs = dict.fromkeys([("F", 0), ("F", 1), ("X", 2), ("B", 2), ("B", 1), ("B", 0)], StageCost(1))
    schedule = Schedule.parse("0F0 0F1 2B0 2B1 0B0 0B1\n1F0 1F1 1B0\n2X0 2X1 1B1")
    work = Workload([("F", 0), ("F", 1), ("X", 2), ("B", 2), ("B", 1), ("B", 0)], 2)
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, costs, work=work, resident=True)
    assert str(caught.value) == (
        "schedule: 3 problems\n"
        "  - stage 1 runs on workers 1, 2; to be resident it needs one\n"
        "  - stage 2 runs on workers 0, 2; to be resident it needs one\n"
        "  - stage 2 runs as X and as B, which are other layers; to be resident it needs a plan cut alike both ways"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda kind, cost, moved: moved._replace(input_bytes=cost.input_bytes),
        lambda kind, cost, moved: moved._replace(output_bytes=cost.output_bytes),
        lambda kind, cost, moved: moved._replace(parameter_bytes=cost.parameter_bytes),
        lambda kind, cost, moved: moved._replace(input_bytes=cost.input_bytes) if kind == "W" else moved,
        lambda kind, cost, moved: moved._replace(output_bytes=0) if kind == "F" else moved,
    ],
    ids=["inputs anew", "outputs always", "parameters", "W reads again", "forward keeps all"],
)
def test_a_rule_that_is_wrong_is_noticed(monkeypatch, wrong):
    def changed(schedule, costs, work):
        moved = moved_costs(schedule, costs, work)
        return {slot: wrong(slot[0], costs[slot], cost) for slot, cost in moved.items()}

    for name in ("simulate", "report"):  # modules, whose names in the package are functions
        monkeypatch.setattr(sys.modules[f"rpfunc.schedule.{name}"], "moved_costs", changed)
    layers = [LayerCost.of_forward(1, parameter_bytes=50, gradient_bytes=70, output_bytes=3)] * 4
    plan = Plan.symmetric(4, range(4))
    found = reported(zb_v, plan, layers, 2, 4, Hardware(upload=3))
    assert (found.uploaded_bytes, found.downloaded_bytes) != (2 * 4 * 6, 2 * 4 * 6)
