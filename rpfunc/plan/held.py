"""What dealt slots hold on their workers at once, with all that is on its way to and from the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rpfunc.checks import count_problems
from rpfunc.errors import PlanError
from rpfunc.plan.costs import LayerCost, StageCost

Bytes = np.ndarray[tuple[int], np.dtype[np.float64]]
"""One number for each card."""


class Ahead(NamedTuple):
    """How far uploads may be ahead, as `Hardware` has it: microbatches for inputs, runs for parameters."""

    prefetch: int = 1
    prefetch_runs: int = 1


SHORTLY = Ahead()
"""As far as hardware has it unless told otherwise."""


def worker_bytes(
    slots: Sequence[StageCost],
    workers: int,
    ways: Sequence[int] | None = None,
    *,
    joined: bool = False,
    ahead: Ahead = SHORTLY,
) -> Bytes:
    """Returns for each card what its worker holds at most while it is computed, if cards are dealt to workers in turn.

    slots   what they cost, in order
    ways    into how many cards each is cut, see `split_dispatch`; None: one each, as `round_robin` has it
    joined  iterations follow each other without a gap
    ahead   of what is computed

    Held are: the parameters of a card and of the `prefetch_runs` after it on its worker; the gradients of the card and
    of the one before it there; its working bytes; the inputs of its microbatch and of the `prefetch` after it; the
    outputs of its microbatch and of the one before. The simulator's peak is no higher where the link to the host keeps
    up: outputs have left before the worker's next microbatch ends, gradients before its next card ends.
    Cost: O(cards). Raises PlanError listing what cannot be. Source: own.

    >>> costs = [StageCost(1, parameter_bytes=10, gradient_bytes=2, working_bytes=5)] * 3
    >>> worker_bytes(costs, workers=1).tolist()
    [27.0, 29.0, 19.0]
    """
    problems = count_problems({"workers": workers}) + ([] if len(slots) else ["has no slot, needs at least one"])
    if ways is not None and len(ways) != len(slots):
        problems.append(f"ways has {len(ways)} numbers, there are {len(slots)} slots")
    if problems:
        raise PlanError.listing("worker_bytes", problems)
    cards = np.array(slots, dtype=np.float64)
    if ways is not None:
        cards = cards.repeat(ways, axis=0)
    total, turns = len(cards), -(-len(cards) // workers)  # so many places further are other iterations' cards
    runs = ahead.prefetch_runs if joined else min(ahead.prefetch_runs, turns)
    if not joined:  # nothing comes before the first cards and after the last ones
        workers = min(workers, total)
        cards = np.concatenate([cards, np.zeros((workers * (turns + 1), cards.shape[1]))])
    _, parameters, gradients, inputs, outputs, working = cards.T

    def later(values: Bytes, places: int) -> Bytes:
        return np.roll(values, -workers * places % len(values))

    most_inputs = np.max([later(inputs, places) for places in range(1 + min(ahead.prefetch, turns))], axis=0)
    all_parameters = np.sum([later(parameters, places) for places in range(1 + runs)], axis=0)
    held: Bytes = (
        all_parameters
        + gradients
        + later(gradients, -1)
        + working
        + (1 + ahead.prefetch) * most_inputs
        + outputs
        + np.maximum(outputs, later(outputs, -1))
    )
    return held[:total]


def most_worker_bytes(slots: Sequence[StageCost], ahead: Ahead = SHORTLY) -> float:
    """Returns a number that `worker_bytes` does not pass, however the slots are dealt; in less time."""
    _, parameters, gradients, inputs, outputs, working = (max(values) for values in zip(*slots, strict=True))
    return float(
        (1 + ahead.prefetch_runs) * parameters + 2 * (gradients + outputs) + (1 + ahead.prefetch) * inputs + working
    )


class SlotRoom(NamedTuple):
    """What a slot of so many layers holds on a worker whose slots are all like it: what `worker_bytes` comes to then.

    It never becomes less with more layers, and does not depend on how other slots are cut. So each input and output
    counts as the largest activation between layers, from what the first one reads to what the last one hands on, and
    what a forward slot keeps for stages that start inside does not count.
    Where iterations join, a forward slot may follow a backward one: `before` are gradients that are then there.
    """

    kind: str
    layers: Sequence[LayerCost]
    ahead: Ahead
    before: float = 0.0

    def firsts(self, memory: float) -> list[int]:
        """Returns for each stop where the longest slot starts that fits; it has one layer even if that does not."""
        sums = [0.0, *accumulate(map(self._of_layer, self.layers))]
        firsts = [0]
        for stop in range(1, len(self.layers) + 1):
            first = firsts[-1]
            while first < stop - 1 and sums[stop] - sums[first] + self._of_activations(first, stop) > memory:
                first += 1
            firsts.append(first)
        return firsts

    def _of_layer(self, layer: LayerCost) -> float:
        """Returns what a layer adds, but for activations."""
        parameter_bytes = (1 + self.ahead.prefetch_runs) * layer.parameter_bytes
        return (
            parameter_bytes if self.kind == "F" else parameter_bytes + 2 * layer.gradient_bytes + layer.residual_bytes
        )

    def _of_activations(self, start: int, stop: int) -> float:
        """Returns what layers start to stop need beside that."""
        outputs = [layer.output_bytes for layer in self.layers[max(0, start - 1) : stop]]
        edges = outputs[:-1] if stop == len(self.layers) else outputs  # nothing follows the last layer
        inputs = (1 + self.ahead.prefetch) * (2 if self.kind == "B" else 1)
        before = self.before if self.kind == "F" else 0.0
        return before + max(outputs[-(stop - start) :]) + (inputs + 2) * max(edges, default=0)
