"""Choosing a plan: the published rule, slowest slot times number of slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from rpfunc.errors import PlanError
from rpfunc.plan.plan import Plan, Span

BACKWARD_COST = 3.0
"""Backward with recomputation, in units of the forward: one forward again, and two products for each of its."""

ROUNDING = 1e-9
"""Relative difference below which two costs are the same: sums of floating-point costs differ in their last bits."""


def partition(costs: Sequence[float], workers: int) -> Plan:
    """Returns the plan that minimises slowest slot * max(slots, workers), given each layer's forward cost (any unit).

    A forward slot costs the sum over its layers; a backward or fused slot BACKWARD_COST times as much. For each bound
    on the slowest slot, stages are filled greedily from the last layer on; the bounds worth trying are sums of
    consecutive layers. Cost: O(L^2) bounds of O(L) each. Ties go to the fewest slots.
    Source: RoundPipe (arXiv 2604.27085), automatic split.
    """
    if not costs or not all(0 <= cost < math.inf for cost in costs) or workers < 1:
        raise PlanError(f"partition: needs finite layer costs >= 0 and workers >= 1, found {list(costs)} and {workers}")
    prefix = [0.0, *accumulate(costs)]
    sums = {prefix[stop] - prefix[start] for stop in range(len(prefix)) for start in range(stop)}
    bounds = sorted({total * factor for total in sums for factor in (1.0, BACKWARD_COST)})
    smallest = BACKWARD_COST * max(costs) * (1 - ROUNDING)
    best: tuple[float, int, Plan] | None = None
    for bound in (bound for bound in bounds if bound >= smallest):
        fused_start = _fill(prefix, len(costs), bound / BACKWARD_COST)
        backward = _groups(prefix, fused_start, bound / BACKWARD_COST)
        forward = _groups(prefix, fused_start, bound)
        plan = Plan(forward, Span(fused_start, len(costs)), backward)
        slots = len(plan.slots)
        score = bound * max(slots, workers)
        if best is None or (score, slots) < best[:2]:
            best = score, slots, plan
    assert best is not None  # the sum of all layers is always a bound worth trying
    return best[2]


def _fill(prefix: list[float], stop: int, bound: float) -> int:
    """Returns the first layer of the largest group that ends at `stop` and costs at most `bound` (up to rounding)."""
    start = stop - 1
    while start > 0 and prefix[stop] - prefix[start - 1] <= bound * (1 + ROUNDING):
        start -= 1
    return start


def _groups(prefix: list[float], stop: int, bound: float) -> tuple[Span, ...]:
    groups = []
    while stop > 0:
        start = _fill(prefix, stop, bound)
        groups.append(Span(start, stop))
        stop = start
    return tuple(reversed(groups))
