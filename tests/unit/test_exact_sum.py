"""Sums of parts, which no order changes: against whole fractions."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from rpfunc.optim.leafwise import exact_sum

HUGE = [1e308, -1e308, 1.7e308, -1.7e308, 1.0, -1e-308, 0.0]


def rounded(parts):
    total = sum(map(Fraction, parts))
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=12))
def test_sums_are_rounded_once(parts):
    assert exact_sum(parts) == rounded(parts)


@given(st.lists(st.sampled_from(HUGE), max_size=8), st.randoms(use_true_random=False))
def test_no_order_changes_a_sum_whose_parts_overflow_on_the_way(parts, order):
    found = exact_sum(parts)
    order.shuffle(parts)
    assert exact_sum(parts) == found
    assert found == rounded(parts)


@given(st.permutations([math.inf, 1.0, 1e308, 1e308]), st.permutations([math.inf, -math.inf, 1.0]))
def test_parts_that_are_not_finite(infinite, both):
    assert exact_sum(infinite) == math.inf
    assert exact_sum([-part for part in infinite]) == -math.inf
    assert math.isnan(exact_sum(both))
    assert math.isnan(exact_sum([*infinite, math.nan]))
