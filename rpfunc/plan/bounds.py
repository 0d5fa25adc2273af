"""How long an iteration takes by the published rule, and how long it takes at least."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from rpfunc.checks import count_problems
from rpfunc.errors import PlanError
from rpfunc.plan.costs import LayerCost, layer_costs, stage_costs
from rpfunc.plan.plan import Plan


def rule_time(plan: Plan, costs: Sequence[LayerCost | float], workers: int, microbatches: int | None = None) -> float:
    """Returns the time of an iteration by the rule that `partition` minimises, computation alone.

    Slowest slot * max(slots, workers) * microbatches / workers: what `round_robin` takes for each of many iterations
    that join, if all slots take as long as the slowest. At most one slot a microbatch is busy, so that fewer
    microbatches than workers count as so many workers. None stands for one microbatch a worker. Unit: the costs'.

    >>> rule_time(Plan.parse("F0:3 X3:4 B0:1 B1:2 B2:3"), [1] * 4, workers=2)
    15
    """
    microbatches = _check(workers, microbatches)
    times = stage_costs(plan, layer_costs(costs))
    slowest = max(times[slot].time for slot in plan.slots)
    if microbatches <= workers:
        return slowest * max(len(plan.slots), microbatches)
    return slowest * max(len(plan.slots), workers) * microbatches / workers


def lower_bound(
    costs: Sequence[LayerCost | float],
    workers: int,
    microbatches: int | None = None,
    *,
    num_blocks: int = 1,
    staleness: int = 0,
) -> float:
    """Returns a time that no plan and no schedule of an iteration goes below; of many that join, none on average.

    The largest of three, computation alone:
    - all the work there is, shared by all workers. A longer fused stage makes it less, but a stage's gradients follow
      each other inside a gradient block, so that this stage for a whole block is a bound as well;
    - the gradients of the dearest layer for a whole block;
    - one microbatch through all layers and back.
    What goes in order, 1 + `staleness` iterations may do at once.
    How far a plan may be from the best: rule_time(plan, ...) / lower_bound(...) - 1. Source: own.

    >>> lower_bound([1] * 8, workers=2, microbatches=8)
    112.0
    """
    microbatches = _check(workers, microbatches, num_blocks, staleness)
    layers = layer_costs(costs)
    in_order = -(-microbatches // num_blocks) / (1 + staleness)
    # a backward pass takes as long as both its halves, if these are shorter
    backward = [min(layer.backward, layer.input_gradient + layer.weight_gradient) for layer in layers]
    times = zip(layers, backward, strict=True)
    apart = accumulate((layer.forward + time for layer, time in times), initial=0.0)
    fused = [*accumulate((layer.fused for layer in reversed(layers)), initial=0.0)][::-1]
    shares = zip(apart, fused, strict=True)
    work = min(max((before + after) * microbatches / workers, after * in_order) for before, after in shares)
    dearest = max(min(layer.backward, layer.fused, layer.weight_gradient) for layer in layers)
    passage = sum(min(layer.forward + min(layer.backward, layer.input_gradient), layer.fused) for layer in layers)
    return max(work, dearest * in_order, passage / (1 + staleness))


def _check(workers: int, microbatches: int | None, num_blocks: int = 1, staleness: int = 0) -> int:
    """Returns the number of microbatches. Raises PlanError listing every number that cannot be."""
    microbatches = workers if microbatches is None else microbatches
    problems = count_problems({"workers": workers, "microbatches": microbatches, "num_blocks": num_blocks})
    problems += count_problems({"staleness": staleness}, least=0)
    if problems:
        raise PlanError.listing("time of an iteration", problems)
    return microbatches
