"""The chosen plan is the best of all plans under the published rule."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc.errors import PlanError
from rpfunc.plan import partition
from rpfunc.testing import strategies


def score(plan, costs, workers):
    """Slowest slot * max(slots, workers), backward and fused slots three times as dear; then the number of slots."""
    loads = [sum(costs[slice(*plan.span(kind, stage))]) * (1 if kind == "F" else 3) for kind, stage in plan.slots]
    return max(loads) * max(len(loads), workers), len(loads)


@settings(max_examples=5 * settings.default.max_examples)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 9))
def test_partition_is_as_good_as_the_best_of_all_plans(costs, workers):
    best = min(score(plan, costs, workers) for plan in strategies.every_plan(len(costs)))
    chosen = partition(costs, workers)
    chosen.check(len(costs))
    assert score(chosen, costs, workers) == best


@settings(max_examples=5 * settings.default.max_examples)
@given(st.lists(st.integers(1, 99).map(lambda cost: cost / 10), min_size=1, max_size=5), st.integers(1, 6))
def test_partition_of_measured_times_is_as_good_but_for_rounding(costs, workers):
    best = min(score(plan, costs, workers)[0] for plan in strategies.every_plan(len(costs)))
    assert score(partition(costs, workers), costs, workers)[0] == pytest.approx(best, rel=1e-6)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 5), st.sampled_from([1e-6, 7.0, 1e12]))
def test_the_unit_of_costs_does_not_matter(costs, workers, unit):
    scaled = [cost * unit for cost in costs]
    assert score(partition(scaled, workers), costs, workers) == score(partition(costs, workers), costs, workers)


def test_backward_is_cut_three_times_as_often_as_forward():
    assert str(partition([1] * 8, 5)) == "F0:6 X6:8 B0:2 B2:4 B4:6"


@pytest.mark.parametrize(("costs", "workers"), [([], 1), ([1.0, -1.0], 1), ([1.0], 0), ([1.0, float("nan")], 2)])
def test_costs_that_mean_nothing_are_refused(costs, workers):
    with pytest.raises(PlanError) as caught:
        partition(costs, workers)
    assert (
        str(caught.value) == f"partition: needs finite layer costs >= 0 and workers >= 1, found {costs} and {workers}"
    )
