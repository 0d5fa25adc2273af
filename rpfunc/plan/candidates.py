"""Plans and deals that are worth a try."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, combinations, pairwise, product
from statistics import median

from rpfunc.plan.classic import least_bottleneck
from rpfunc.plan.costs import LayerCost
from rpfunc.plan.deal import Deal
from rpfunc.plan.plan import Plan, Span

MOST_SLOTS = 6
"""Backward slots a worker up to which balanced plans are tried: more of them cost transfers and gain little."""


def every_plan(num_layers: int) -> Iterator[Plan]:
    """Yields all plans with a fused stage: 1 + (4^(num_layers-1) - 1) / 3 of them."""
    yield Plan.single(num_layers)
    for turn in range(1, num_layers):
        inner = range(1, turn)
        cuts = list(chain.from_iterable(combinations(inner, size) for size in range(len(inner) + 1)))
        for forward, backward in product(cuts, repeat=2):
            yield Plan.cut(num_layers, [0, *forward, turn], [0, *backward, turn])


def balanced_plans(layers: Sequence[LayerCost], workers: int) -> Iterator[Plan]:
    """Yields plans whose slots of each kind are as even as can be, forward ones as long as backward ones or shorter."""
    num_layers = len(layers)
    forward, backward = (
        [0.0, *accumulate(getattr(layer, kind) for layer in layers)] for kind in ("forward", "backward")
    )
    fused = list(accumulate((layer.fused for layer in reversed(layers)), initial=0.0))
    yield Plan.single(num_layers)
    for size in range(1, num_layers):
        # the first fused stage is the smallest; a worker's even share of all work is long enough for any
        if size > 1 and fused[size] * workers > forward[-1] + backward[-1] and fused[size] > 2 * fused[1]:
            return
        turn, slowest = num_layers - size, math.inf
        for num_backward in range(1, min(turn, MOST_SLOTS * workers) + 1):
            cuts = least_bottleneck(backward[: turn + 1], num_backward)
            longest = max(backward[stop] - backward[start] for start, stop in pairwise(cuts))
            if longest >= slowest * (1 - 1e-9):
                continue
            slowest = longest
            # embeddings may take no time at all
            fewest = min(turn, max(1, math.ceil(forward[turn] / slowest * (1 - 1e-9)))) if slowest else 1
            for num_forward in sorted({fewest, min(fewest + 1, turn), min(2 * fewest, turn)}):
                starts = least_bottleneck(forward[: turn + 1], num_forward)
                yield Plan(_spans(starts), Span(turn, num_layers), _spans(cuts))


def deals(plan: Plan, times: Sequence[float], workers: int, microbatches: int) -> Iterator[Deal]:
    """Yields ways of dealing a plan's slots: each to one worker; long ones, the first and last, or all to several."""
    once = [1] * len(times)
    typical = median(times)
    several = sorted({ways for ways in (2, 3, workers, microbatches) if 1 < ways <= microbatches})
    found = [once]
    for rounded in (round, math.ceil):
        found.append([min(microbatches, max(1, rounded(time / typical))) if typical else 1 for time in times])
    for ways in several:
        found.append([ways] * len(times))
        found.append([ways, *once[1:-1], ways][: len(times)])
    yield from (Deal(plan, ways) for ways in dict.fromkeys(map(tuple, found)))


def neighbours(deal: Deal) -> Iterator[Deal]:
    """Yields the deals of plans in which one cut is moved by a layer."""
    plan = deal.plan
    for kind, spans in (("forward", plan.forward), ("backward", plan.backward)):
        for index in range(1, len(spans)):
            left, right = spans[index - 1], spans[index]
            for cut in (right.start - 1, right.start + 1):
                if left.start < cut < right.stop:
                    moved = (*spans[: index - 1], Span(left.start, cut), Span(cut, right.stop), *spans[index + 1 :])
                    changed = (
                        Plan(moved, plan.fused, plan.backward)
                        if kind == "forward"
                        else Plan(plan.forward, plan.fused, moved)
                    )
                    yield Deal(changed, deal.ways)


def _spans(cuts: Sequence[int]) -> tuple[Span, ...]:
    return tuple(map(Span, cuts[:-1], cuts[1:]))
