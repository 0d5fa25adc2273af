"""The published rule, slowest slot times number of slots, solved exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from rpfunc.plan.costs import LayerCost
from rpfunc.plan.filling import ROUNDING, Filled, Line, num_slots, smallest_bound
from rpfunc.plan.held import SlotRoom
from rpfunc.plan.plan import Plan, Span


def best_plans(
    models: Sequence[Sequence[LayerCost]],
    trained: Sequence[bool],
    workers: int,
    rooms: Sequence[Mapping[str, SlotRoom]] = (),
    memory: float = math.inf,
) -> tuple[Plan, ...]:
    """Returns the plans, one a model, with the least slowest slot * max(slots, workers) over all of them.

    rooms   for each model what slots of each kind hold, where memory is limited
    memory  bytes that no slot of several layers passes

    Exact, up to ROUNDING; ties go to the fewest slots. Source: as `partition` has it.
    """
    firsts = [{kind: room.firsts(memory) for kind, room in each.items()} for each in rooms] or [{} for _ in models]
    lines = [_Lines.of(*model) for model in zip(models, trained, firsts, strict=True)]
    bound = _best_bound(lines, workers)
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
    def of(cls, layers: Sequence[LayerCost], trained: bool, firsts: Mapping[str, Sequence[int]]) -> _Lines:
        def line(kind: str, times: list[float]) -> Line:
            return Line([0, *accumulate(times)], firsts.get(kind) or [0] * (len(layers) + 1))

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
