"""Every valid schedule really runs: the gradient of the same function, with the same bits."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc import Batch, Plan, random, value_and_grad
from rpfunc.models import decoder
from rpfunc.objectives import sft
from rpfunc.plan.costs import uniform_costs
from rpfunc.schedule import (
    Schedule,
    Workload,
    gpipe,
    greedy,
    interleaved,
    looped_bfs,
    one_f_one_b,
    round_robin,
    split_dispatch,
    validate,
    zb_h1,
    zb_v,
)
from rpfunc.schedule.zero_bubble import halve
from rpfunc.testing import assert_computes, assert_equal_bits, exact, strategies
from rpfunc.testing.schedules import runnable_schedules, unfused_plans

OBJECTIVES = {"linear": exact.linear, "squared": exact.squared}
BODIES = (("square", "causal"), ("relu", "opaque"), ("bidirectional",), ())

EACH, PAIRS = Plan.symmetric(4, [0, 1, 2, 3]), Plan.symmetric(4, [0, 2])
ROUND = Plan.parse("F0:2 F2:3 X3:4 B0:1 B1:3")


def reversed_halves(work, num_workers):
    """A schedule of a reader's own: all I, then all W, the last microbatch's block first."""
    del num_workers
    tasks = halve(work).tasks
    early = [task for task in tasks if task.kind != "W"]
    return Schedule((tuple(early), tuple(task for task in tasks if task.kind == "W" and task.stage == 1), tuple(
        task for task in tasks if task.kind == "W" and task.stage == 0
    )))  # fmt: skip


GENERATED = {
    "round robin": (round_robin, ROUND, 3, 1),
    "gpipe": (gpipe, PAIRS, 2, 1),
    "gpipe with four workers": (gpipe, EACH, 4, 1),
    "1F1B": (one_f_one_b, PAIRS, 2, 1),
    "1F1B with four workers": (one_f_one_b, EACH, 4, 1),
    "interleaved": (interleaved, EACH, 2, 1),
    "looped": (looped_bfs, EACH, 2, 1),
    "ZB-H1": (zb_h1, PAIRS, 2, 1),
    "ZB-H1 with four workers": (zb_h1, EACH, 4, 1),
    "ZB-V": (zb_v, EACH, 2, 1),
    "split dispatch": (partial(split_dispatch, ways={("X", 2): 2}), ROUND, 3, 2),
    "split dispatch without a fused stage": (partial(split_dispatch, ways={("B", 1): 4}), PAIRS, 4, 4),
    "greedy": (partial(greedy, costs=uniform_costs(ROUND)), ROUND, 3, 2),
    "greedy without a fused stage": (partial(greedy, costs=uniform_costs(EACH)), EACH, 4, 1),
    "a reader's own": (reversed_halves, PAIRS, 3, 1),
}


def smooth(tree, seed=0):
    """As many float32 numbers that are no integers: every sum rounds."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: smooth(part, seed + 1) if isinstance(part, dict) else torch.randn(part.shape, generator=generator)
        for name, part in tree.items()
    }


def bits(model, params, **options):
    result, grads = value_and_grad(model, exact.linear(), **options)(params, exact.batch(5, 4))
    return {"loss": result.loss, **grads}


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("name", GENERATED)
def test_generated_schedules_are_exact_and_have_the_same_bits(name, chunk):
    generate, plan, num_workers, blocks = GENERATED[name]
    same = {"microbatches": 4, "blocks": blocks, "chunk": chunk}
    how = {"plan": plan, "schedule": generate, "workers": num_workers}
    model = exact.model()
    function = value_and_grad(model, exact.squared(), **same, **how)
    assert_computes(function, model, exact.squared(), exact.init(), exact.batch(5, 4))
    params = smooth(exact.init())
    wanted = bits(model, params, **same)
    for recompute in (True, False):
        assert_equal_bits(bits(model, params, **same, **how, recompute=recompute), wanted)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_schedules_run_as_they_are_written(name):
    generate, plan, num_workers, blocks = GENERATED[name]
    schedule = generate(Workload(plan.slots, 4, blocks), num_workers)
    function = value_and_grad(
        exact.model(), exact.linear(), plan=plan, schedule=str(schedule), workers=num_workers, microbatches=4,
        blocks=blocks,
    )  # fmt: skip
    timeline = function(exact.init(), exact.batch(5, 4))[0].timeline
    assert timeline.num_workers == num_workers
    ran = [[event.task for event in timeline.events if event.worker == worker] for worker in range(num_workers)]
    assert Schedule(tuple(map(tuple, ran))) == schedule


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", ["ZB-V", "split dispatch", "a reader's own"])
def test_frozen_leaves_get_no_gradient_in_halves_either(name, recompute):
    generate, plan, num_workers, blocks = GENERATED[name]
    same = {"microbatches": 4, "blocks": blocks, "frozen": lambda path, leaf: path == "square0.weight"}
    how = {"plan": plan, "schedule": generate, "workers": num_workers, "recompute": recompute}
    params = smooth(exact.init())
    found, wanted = (bits(exact.model(), params, **options) for options in (same | how, same))
    assert found["square0"].pop("weight") is wanted["square0"].pop("weight") is None
    assert_equal_bits(found, wanted)


def draw_run(data, num_layers, num_examples):
    """A plan and any schedule of any halves, as options; and the options that decide the bits."""
    plan = data.draw(strategies.plans(num_layers) | unfused_plans(num_layers), "plan")
    num_microbatches = data.draw(st.integers(1, num_examples), "microbatches")
    blocks = data.draw(st.integers(1, num_microbatches), "blocks")
    num_workers = data.draw(st.integers(1, 4), "workers")
    schedule = data.draw(runnable_schedules(Workload(plan.slots, num_microbatches, blocks), num_workers), "schedule")
    same = {"microbatches": num_microbatches, "blocks": blocks, "chunk": data.draw(strategies.chunks(4), "chunk")}
    return {"plan": plan, "workers": num_workers, "schedule": schedule}, same


def draw_order(data, same):
    """The order, if there is a choice, and whether to recompute, if there is one."""
    if same["chunk"] is not None:
        same["order"] = data.draw(st.sampled_from(["layer", "chunk"]), "order")
    return same.get("order") == "chunk" or data.draw(st.booleans(), "recompute")


@settings(max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_any_schedule_is_exact(data):
    body, tied = data.draw(st.sampled_from(BODIES), "body"), data.draw(st.booleans(), "tied")
    model, seed = exact.model(body, tied=tied), data.draw(st.integers(0, 10_000), "seed")
    objective = OBJECTIVES[data.draw(st.sampled_from(sorted(OBJECTIVES)), "objective")]()
    how, same = draw_run(data, model.num_layers, 4)
    function = value_and_grad(model, objective, recompute=data.draw(st.booleans(), "recompute"), **how, **same)
    assert_computes(function, model, objective, exact.init(body, tied=tied, seed=seed), exact.batch(4, 4, seed=seed))


@settings(max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_any_schedule_gives_the_same_bits(data):
    model, params = exact.model(("relu", "causal")), smooth(exact.init(("relu", "causal")))
    how, same = draw_run(data, model.num_layers, 5)
    recompute = draw_order(data, same)
    assert_equal_bits(bits(model, params, **how, **same, recompute=recompute), bits(model, params, **same))


@settings(max_examples=8)
@given(st.data())
def test_any_schedule_of_a_decoder_with_dropout_gives_the_same_bits(data):
    config = decoder.DecoderConfig(
        vocabulary=7, width=6, layers=2, heads=2, kv_heads=1, head_size=4, mlp_width=5, dropout=0.25
    )
    model, params = decoder.model(config), decoder.init(config, random.key(0))
    tokens = torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(0))
    batch = Batch(row={"tokens": tokens, "labels": tokens}, constant={"key": random.key(1)})
    how, same = draw_run(data, model.num_layers, 3)
    found, wanted = (value_and_grad(model, sft(), **options)(params, batch) for options in (how | same, same))
    assert_equal_bits({"loss": found[0].loss, **found[1]}, {"loss": wanted[0].loss, **wanted[1]})


@given(st.data())
def test_what_the_strategies_draw_is_valid(data):
    plan = data.draw(strategies.plans(4) | unfused_plans(4))
    plan.check(4)
    work = Workload(plan.slots, data.draw(st.integers(2, 4)), data.draw(st.integers(1, 2)))
    schedule = data.draw(runnable_schedules(work, 3))
    assert len(schedule.workers) == 3
    validate(schedule, work)


def test_the_strategy_draws_every_kind_of_schedule():
    work = Workload(Plan.symmetric(2, [0, 1]).slots, 2, num_blocks=2)
    seen = set()

    @settings(max_examples=200, database=None)
    @given(runnable_schedules(work, 2))
    def look(schedule):
        places = {
            str(task): (worker, place)
            for worker, tasks in enumerate(schedule.workers)
            for place, task in enumerate(tasks)
        }
        seen.add("halved" if "0I0" in places else "whole")
        seen.add("both kinds" if ("0I0" in places) != ("0I1" in places) else "one kind")
        seen.add("spread" if places["0F0"][0] != places["0F1"][0] else "together")
        seen.add("idle" if () in schedule.workers else "busy")
        if "0B0" in places and "0B1" in places and places["0B0"][0] == places["0B1"][0]:
            seen.add("in order" if places["0B0"][1] < places["0B1"][1] else "blocks in another order")

    look()
    assert seen == {
        "halved", "whole", "both kinds", "one kind", "spread", "together", "idle", "busy", "in order",
        "blocks in another order",
    }  # fmt: skip
