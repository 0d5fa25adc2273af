"""Choosing a plan: the published rule, slowest slot times number of slots, solved exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from rpfunc.errors import PlanError
from rpfunc.plan.checks import count_problems, size_problems
from rpfunc.plan.costs import LayerCost, layer_costs
from rpfunc.plan.filling import ROUNDING, Filled, Line, num_slots, smallest_bound
from rpfunc.plan.plan import Plan, Span


def partition(
    costs: Sequence[LayerCost | float],
    workers: int,
    microbatches: int | None = None,
    memory: float | None = None,
) -> Plan:
    """Returns the plan that minimises slowest slot * max(slots, workers); ties go to the fewest slots.

    costs         of the layers; plain numbers are forward times, see `LayerCost.of_forward`
    workers       that slots are dealt to
    microbatches  of an iteration, None for at least as many as workers; fewer keep no more workers than that busy
    memory        bytes of a worker that no slot may pass, see `rpfunc.plan.costs.slot_bytes`; None for no limit

    The optimum is exact, up to ROUNDING. Cost: about 1 ms for 100 layers, 20 ms for 1,000 (1 s if memory is scarce).
    Raises PlanError for what cannot be, and, if a layer alone passes the memory, naming each such layer and what would
    do. Source: the rule is RoundPipe's (arXiv 2604.27085, automatic split), the search own.

    >>> print(partition([1] * 8, workers=5))
    F0:6 X6:8 B0:2 B2:4 B4:6
    """
    return partition_jointly([costs], workers, [True], microbatches, memory)[0]


def partition_jointly(
    models: Sequence[Sequence[LayerCost | float]],
    workers: int,
    trained: Sequence[bool],
    microbatches: int | None = None,
    memory: float | None = None,
) -> tuple[Plan, ...]:
    r"""Returns one plan a model for models that run in one iteration: their slots are dealt as one sequence.

    Minimises what `partition` does, over the slots of all. A model that is not trained (a policy's reference) has
    forward stages alone. Raises PlanError as `partition` does.

    >>> print(*partition_jointly([[1] * 4, [1] * 4], workers=4, trained=[True, False]), sep="\n")
    F0:3 X3:4 B0:1 B1:2 B2:3
    F0:1 F1:4
    """
    _check(models, workers, trained, microbatches, memory)
    layers = [layer_costs(costs) for costs in models]
    if memory is not None:
        _check_memory(layers, trained, memory)
    lines = [_Lines.of(*model, math.inf if memory is None else memory) for model in zip(layers, trained, strict=True)]
    bound = _best_bound(lines, workers if microbatches is None else min(workers, microbatches))
    return tuple(model.plan(bound) for model in lines)


def _best_bound(models: Sequence[_Lines], workers: int) -> float:
    """Returns the bound on the slowest slot whose plan is best.

    The fewest slots under a bound: the longest fused slot that it allows, since fewer layers before never need more
    slots, whatever each kind's times; then slots filled from the last layer on, each as far as it goes. With a higher
    bound they never become more. So for each number of slots the smallest bound counts alone, and that only if it
    improves on the best score: where the bound that would needs more slots, all numbers up to those are done with.
    """

    def fill(bound: float) -> list[Filled]:
        return [filled for model in models for filled in model.fill(bound)]

    smallest, largest = max(model.smallest for model in models), max(model.largest for model in models)
    slots = max(workers, num_slots(fill(largest)))
    best, score = largest, math.inf
    while slots * smallest < score * (1 - 8 * ROUNDING):
        limit = min(largest, score / slots * (1 - 8 * ROUNDING))
        needed = num_slots(fill(limit))
        if needed <= slots:
            best = smallest_bound(fill, slots, smallest, limit)
            score = best * slots
        slots = max(slots + 1, needed)
    return best


class _Lines(NamedTuple):
    """A model: a line for each kind of slot; forward alone if it is not trained.

    smallest  no bound below it has a plan
    largest   with it nothing but memory bounds a slot
    """

    forward: Line
    fused: Line | None
    backward: Line | None
    smallest: float
    largest: float

    @classmethod
    def of(cls, layers: Sequence[LayerCost], trained: bool, memory: float) -> _Lines:
        def line(kind: str, times: list[float]) -> Line:
            return Line([0, *accumulate(times)], _first(kind, layers, memory))

        forward = [layer.forward for layer in layers]
        if not trained:
            return cls(line("F", forward), None, None, max(forward), sum(forward))
        fused, backward = [layer.fused for layer in layers], [layer.backward for layer in layers]
        lines = line("F", forward), line("X", fused), line("B", backward)
        # a layer is in the fused slot, with all that follow, or in a forward and in a backward slot
        after = list(accumulate(reversed(fused)))[::-1]
        apart = list(map(max, forward, backward))
        turn = lines[1].first[-1]
        smallest = max(*apart[:turn], *map(min, apart[turn:-1], after[turn:-1]), after[-1], 0)
        return cls(*lines, smallest, max(sum(forward), sum(fused), sum(backward)))

    def fill(self, bound: float) -> list[Filled]:
        """Returns the fewest slots under a bound: forward, and if trained fused and backward."""
        num_layers = len(self.forward.sums) - 1
        if self.fused is None or self.backward is None:
            return [self.forward.fill(num_layers, bound)]
        turn = self.fused.start(num_layers, bound)
        fused = Filled(self.fused, [num_layers, turn])
        return [self.forward.fill(turn, bound), fused, self.backward.fill(turn, bound)]

    def plan(self, bound: float) -> Plan:
        """Returns the plan whose slots are those."""
        forward, *rest = [tuple(map(Span, cuts[:0:-1], cuts[-2::-1])) for _, cuts in self.fill(bound)]
        return Plan(forward, rest[0][0], rest[1]) if rest else Plan(forward, None, ())


def _first(kind: str, layers: Sequence[LayerCost], memory: float) -> list[int]:
    """Returns for each stop where the longest slot starts that fits."""
    if memory == math.inf:
        return [0] * (len(layers) + 1)
    sums = [0, *accumulate(_layer_bytes(kind, layer) for layer in layers)]
    outputs = [layer.output_bytes for layer in layers]
    firsts = [0]
    for stop in range(1, len(layers) + 1):
        first = firsts[-1]
        while first < stop - 1 and sums[stop] - sums[first] + max(outputs[first:stop]) > memory:
            first += 1
        firsts.append(first)
    return firsts


def _layer_bytes(kind: str, layer: LayerCost) -> float:
    """Returns what a layer adds to its slot's bytes, but for the largest output."""
    parameter_bytes = 2 * layer.parameter_bytes
    return parameter_bytes if kind == "F" else parameter_bytes + layer.gradient_bytes + layer.residual_bytes


def _check(
    models: Sequence[Sequence[object]],
    workers: int,
    trained: Sequence[bool],
    microbatches: int | None,
    memory: float | None,
) -> None:
    problems = [] if models else ["has no model, needs at least one"]
    if len(trained) != len(models):
        problems.append(f"trained says so of {len(trained)} models, there are {len(models)}")
    problems += count_problems({"workers": workers} | ({} if microbatches is None else {"microbatches": microbatches}))
    problems += [] if memory in (None, math.inf) else size_problems({"memory": memory})
    if problems:
        raise PlanError.listing("partition", problems)


def _check_memory(models: Sequence[Sequence[LayerCost]], trained: Sequence[bool], memory: float) -> None:
    needs = {
        (f"layer {index} of model {number}" if len(models) > 1 else f"layer {index}"): layer.output_bytes
        + _layer_bytes("X" if trains else "F", layer)
        for number, (layers, trains) in enumerate(zip(models, trained, strict=True))
        for index, layer in enumerate(layers)
    }
    problems = [
        f"{name} alone takes {_whole(need)} (parameters twice, gradients, and what is live meanwhile)"
        for name, need in needs.items()
        if not need <= memory
    ]
    if problems:
        raise PlanError.listing(
            f"partition: memory is {_whole(memory)} bytes a worker, {math.ceil(max(needs.values()))} would do", problems
        )


def _whole(num_bytes: float) -> float:
    """Returns a number of bytes as one that prints without a point, where it has none."""
    return int(num_bytes) if num_bytes == int(num_bytes) else num_bytes
