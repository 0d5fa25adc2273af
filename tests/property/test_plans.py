"""Every plan, worker count, microbatch count and chunk size computes the gradient of the same function."""

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc import Plan, value_and_grad
from rpfunc.testing import assert_computes, exact, strategies
from rpfunc.testing.schedules import unfused_plans

OBJECTIVES = {"linear": exact.linear, "squared": exact.squared}
BODIES = (("square", "causal"), ("causal", "relu", "square"), ("relu", "bidirectional"), ("square", "opaque", "linear"))


@pytest.mark.parametrize(("index", "plan"), list(enumerate(strategies.every_plan(4))))
def test_every_plan_of_four_layers_is_exact(index, plan):
    function = value_and_grad(
        exact.model(),
        exact.linear(),
        plan=plan,
        workers=(None, 1, 2, 3, 4)[index % 5],
        microbatches=1 + index % 4,
        chunk=(None, 1, 2, 3, 4, 12)[index % 6],
        recompute=index % 2 == 0,
    )
    assert_computes(function, exact.model(), exact.linear(), exact.init(seed=index), exact.batch(3, 6, seed=index))


CUTS = [[0, *cut] for cut in chain.from_iterable(combinations((1, 2, 3), size) for size in range(4))]


@pytest.mark.parametrize(("index", "forward"), list(enumerate(CUTS)))
def test_every_plan_of_four_layers_without_a_fused_stage_is_exact(index, forward):
    for place, backward in enumerate(CUTS):
        plan = Plan(Plan.symmetric(4, forward).forward, None, Plan.symmetric(4, backward).backward)
        objective = (exact.linear, exact.squared)[(index + place) % 2]()
        function = value_and_grad(
            exact.model(),
            objective,
            plan=plan,
            workers=(None, 1, 2, 3, 4)[place % 5],
            microbatches=1 + place % 3,
            chunk=(None, 1, 2, 12)[(index + place) % 4],
            recompute=place % 2 == 0,
        )
        assert_computes(function, exact.model(), objective, exact.init(seed=place), exact.batch(3, 4, seed=place))


@settings(max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_any_run_is_exact(data):
    body, tied = data.draw(st.sampled_from(BODIES), "body"), data.draw(st.booleans(), "tied")
    model, num_rows = exact.model(body, tied=tied), data.draw(st.integers(1, 6), "rows")
    objective = OBJECTIVES[data.draw(st.sampled_from(sorted(OBJECTIVES)), "objective")]()
    seed = data.draw(st.integers(0, 10_000), "seed")
    batch = exact.batch(data.draw(st.integers(1, 4), "examples"), num_rows, seed=seed)
    function = value_and_grad(
        model,
        objective,
        plan=data.draw(strategies.plans(model.num_layers) | unfused_plans(model.num_layers) | st.none(), "plan"),
        workers=data.draw(strategies.workers(), "workers"),
        microbatches=data.draw(strategies.microbatches(), "microbatches"),
        chunk=data.draw(strategies.chunks(num_rows), "chunk"),
        recompute=data.draw(st.booleans(), "recompute"),
    )
    assert_computes(function, model, objective, exact.init(body, tied=tied, seed=seed), batch)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 9])
@pytest.mark.parametrize("chunk", [None, 2])
def test_pairs_are_never_cut(chunk, num_microbatches):
    batch = exact.batch(6, 4, group_size=2)
    function = value_and_grad(exact.model(), exact.paired(), workers=2, microbatches=num_microbatches, chunk=chunk)
    assert_computes(function, exact.model(), exact.paired(), exact.init(), batch)


@pytest.mark.parametrize("num_examples", [1, 2, 5, 10])
@pytest.mark.parametrize("num_microbatches", [1, 3, 4])
def test_batches_that_do_not_divide_are_exact_for_one_to_four_stages(num_examples, num_microbatches):
    batch = exact.batch(num_examples, 2, seed=num_examples)
    for plan in (None, "X0:4", "F0:3 X3:4 B0:3", "F0:2 F2:3 X3:4 B0:3", "F0:1 F1:2 F2:3 X3:4 B0:1 B1:2 B2:3"):
        plan = None if plan is None else strategies.Plan.parse(plan)
        function = value_and_grad(exact.model(), exact.linear(), plan=plan, workers=2, microbatches=num_microbatches)
        assert_computes(function, exact.model(), exact.linear(), exact.init(), batch)


def test_fewer_examples_than_microbatches_run_as_fewer_microbatches():
    function = value_and_grad(exact.model(), exact.linear(), microbatches=4)
    result, _ = function(exact.init(), exact.batch(2, 3))
    assert sorted({event.task.microbatch for event in result.timeline.events}) == [0, 1]
