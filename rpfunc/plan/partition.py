"""Choosing a plan: the published rule, within a limit on memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rpfunc.checks import count_problems, shown, size_problems
from rpfunc.errors import PlanError
from rpfunc.plan.costs import LayerCost, layer_costs, slot_costs_of
from rpfunc.plan.held import SHORTLY, Ahead, Bytes, SlotRoom, worker_bytes
from rpfunc.plan.plan import Plan, Span
from rpfunc.plan.rule import best_plans

TAKES = "with the next slot's parameters, the last one's gradients, and activations"
"""What is counted, for errors."""


def partition(
    costs: Sequence[LayerCost | float],
    workers: int,
    microbatches: int | None = None,
    memory: float | None = None,
    *,
    joined: bool = False,
) -> Plan:
    """Returns the plan that minimises slowest slot * max(slots, workers); ties go to the fewest slots.

    costs         of the layers; plain numbers are forward times, see `LayerCost.of_forward`
    workers       that slots are dealt to
    microbatches  of an iteration, None for at least as many as workers; fewer keep no more workers than that busy
    memory        bytes of a worker, which `worker_bytes` of the plan's slots does not pass; None for no limit
    joined        iterations follow each other without a gap, which matters for memory alone: another one's slots come
                  before the first and after the last

    The optimum is exact, up to ROUNDING. Under a limit it is the best plan whose slots each keep it if all slots are
    like them (`SlotRoom`); where that passes the limit, since they are not, the best under a lower one for slots.
    Cost: about 1 ms for 100 layers, 20 ms for 1,000 (1 s if memory is scarce; a few times that if a limit is lowered).
    Raises PlanError for what cannot be; if memory does not do, naming each layer that alone passes it, and a limit that
    would do. Source: the rule is RoundPipe's (arXiv 2604.27085, automatic split), the search own.

    >>> print(partition([1] * 8, workers=5))
    F0:6 X6:8 B0:2 B2:4 B4:6
    """
    return partition_jointly([costs], workers, [True], microbatches, memory, joined=joined)[0]


def partition_jointly(
    models: Sequence[Sequence[LayerCost | float]],
    workers: int,
    trained: Sequence[bool],
    microbatches: int | None = None,
    memory: float | None = None,
    *,
    joined: bool = False,
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
    busy = workers if microbatches is None else min(workers, microbatches)
    return Models(layers, trained, workers, busy, joined).within(math.inf if memory is None else memory)


class Models(NamedTuple):
    """Models that run in one iteration, and what their slots are dealt to.

    workers  that slots are dealt to
    busy     how many of them the rule counts
    joined   iterations follow each other without a gap
    ahead    how far uploads are
    """

    layers: Sequence[Sequence[LayerCost]]
    trained: Sequence[bool]
    workers: int
    busy: int
    joined: bool = False
    ahead: Ahead = SHORTLY

    def within(self, memory: float) -> tuple[Plan, ...]:
        """Returns the best plans whose `worker_bytes` keep a limit, or raises PlanError; see `partition`.

        The limit for slots is the memory at first, and is lowered until all of them together keep it.
        """
        if memory == math.inf:
            return best_plans(self.layers, self.trained, self.busy)
        limit, step = memory, 0.0
        while limit >= 0:
            plans = best_plans(self.layers, self.trained, self.busy, self._rooms, limit)
            over = self.bytes_of(plans) - memory
            if over <= 0:
                return plans
            step = max(over, 2 * step, memory * 2**-20)
            limit -= step
        plans = self.smallest
        if self.bytes_of(plans) <= memory:
            return plans
        raise self.too_little(memory, "partition", self.bytes_of(plans))

    @property
    def smallest(self) -> tuple[Plan, ...]:
        """The plans whose slots have one layer each, or all of a model if that takes less: fewer activations move."""
        whole = tuple(
            Plan.single(len(own)) if trains else Plan((Span(0, len(own)),), None, ())
            for own, trains in zip(self.layers, self.trained, strict=True)
        )
        return min(self._one_each, whole, key=self.bytes_of)

    @property
    def _one_each(self) -> tuple[Plan, ...]:
        return best_plans(self.layers, self.trained, self.busy, self._rooms, -1.0)

    def bytes_of(self, plans: Sequence[Plan]) -> float:
        """Returns the most `worker_bytes` of the slots of all plans, one plan after the other."""
        return float(self._bytes(plans).max())

    def too_little(self, memory: float, subject: str, would_do: float) -> PlanError:
        """Returns the error that names the layers that pass the memory, each in a slot of its own."""
        places = [(number, plan.span(*slot).start) for number, plan in enumerate(self._one_each) for slot in plan.slots]
        needs = dict.fromkeys(sorted(places), 0.0)
        for place, need in zip(places, self._bytes(self._one_each).tolist(), strict=True):
            needs[place] = max(needs[place], need)
        problems = [
            f"layer {index}{f' of model {number}' if len(self.layers) > 1 else ''} alone takes {whole(need)} ({TAKES})"
            for (number, index), need in needs.items()
            if need > memory
        ] or [f"the smallest slots take {whole(would_do)}, since transfers fall behind computation"]
        sizes = f"memory is {whole(memory)} bytes a worker, {math.ceil(would_do)} would do"
        return PlanError.listing(f"{subject}: {sizes}", problems)

    def _bytes(self, plans: Sequence[Plan]) -> Bytes:
        slots = [cost for plan, own in zip(plans, self.layers, strict=True) for cost in slot_costs_of(own)(plan)]
        return worker_bytes(slots, self.workers, joined=self.joined, ahead=self.ahead)

    @property
    def _rooms(self) -> list[dict[str, SlotRoom]]:
        """What slots of each kind hold, model by model."""
        models = list(zip(self.layers, self.trained, strict=True))
        gradients = [layer.gradient_bytes for own, trains in models if trains for layer in own]
        before = max(gradients, default=0.0) if self.joined else 0.0
        return [
            {kind: SlotRoom(kind, own, self.ahead, before) for kind in ("FXB" if trains else "F")}
            for own, trains in models
        ]


def whole(num_bytes: float) -> float:
    """Returns a number of bytes as one that prints without a point, where it has none."""
    return int(num_bytes) if num_bytes == int(num_bytes) else num_bytes


def _check(
    models: Sequence[Sequence[object]],
    workers: int,
    trained: Sequence[bool],
    microbatches: int | None,
    memory: float | None,
) -> None:
    given = {"models": models, "trained": trained}
    problems = [
        f"{name} is {shown(value)}, it must be a sequence"
        for name, value in given.items()
        if not isinstance(value, Sequence)
    ]
    if problems:
        raise PlanError.listing("partition", problems)
    problems = [] if models else ["has no model, needs at least one"]
    if len(trained) != len(models):
        problems.append(f"trained says so of {len(trained)} models, there are {len(models)}")
    problems += count_problems({"workers": workers} | ({} if microbatches is None else {"microbatches": microbatches}))
    problems += [] if memory in (None, math.inf) else size_problems({"memory": memory})
    if problems:
        raise PlanError.listing("partition", problems)
