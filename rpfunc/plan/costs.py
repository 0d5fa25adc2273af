"""What layers and stages cost: time and bytes, as plain values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple, Self

import numpy as np

from rpfunc.checks import is_size, plain_number, shown, size_needed, size_problems
from rpfunc.errors import PlanError
from rpfunc.plan.plan import Plan, Span


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for one microbatch. Times may have any unit, as long as all have the same.

    forward          of the layer's forward
    backward         of its backward with recomputation: a forward, and both gradients
    fused            of its forward and backward at the turn, where nothing is recomputed
    input_gradient   of the part of `backward` that gives the input's gradient (recomputation included)
    weight_gradient  of the part that gives the parameters' gradients
    parameter_bytes  read by the layer, as uploaded to a worker
    gradient_bytes   of its parameters' gradients, as downloaded
    output_bytes     of what it hands to the next layer
    residual_bytes   of what its backward needs beside parameters and input

    Numbers are 0, or from 1e-100 to 1e100, so that none that follows from them is too small or large for a float.
    Raises PlanError listing every one that is not.
    """

    forward: float
    backward: float
    fused: float
    input_gradient: float
    weight_gradient: float
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    output_bytes: float = 0.0
    residual_bytes: float = 0.0

    def __post_init__(self) -> None:
        problems = size_problems(vars(self))
        if problems:
            raise PlanError.listing("cost", problems)
        for name, value in vars(self).items():
            object.__setattr__(self, name, plain_number(value))

    @classmethod
    def of_forward(cls, forward: float, **sizes: float) -> LayerCost:
        """Returns the usual cost: each of the two gradients takes as long as the forward.

        >>> LayerCost.of_forward(1.0).backward
        3.0
        """
        return cls(forward, 3 * forward, 3 * forward, 2 * forward, forward, **sizes)


def layer_costs(costs: Sequence[LayerCost | float]) -> list[LayerCost]:
    """Returns one cost a layer; a plain number is the time of a layer's forward, see `LayerCost.of_forward`.

    Raises PlanError if there is none, or listing every layer whose number means nothing.

    >>> layer_costs([1.0, 2.0])[1].backward
    6.0
    """
    if not isinstance(costs, Sequence | np.ndarray) or isinstance(costs, str):  # what has no order has no layers
        raise PlanError(f"costs: is of type {type(costs).__name__}, needs a sequence of one cost a layer")
    problems = [] if len(costs) else ["has no layer, needs at least one"]
    layers = []
    for index, cost in enumerate(costs):
        if isinstance(cost, LayerCost):
            layers.append(cost)
        elif is_size(cost):
            layers.append(LayerCost.of_forward(cost))
        else:
            problems.append(f"layer {index} costs {shown(cost)}, {size_needed(cost)}")
    if problems:
        raise PlanError.listing("costs", problems)
    return layers


TIMES = tuple(field.name for field in fields(LayerCost))[:5]
"""The fields of `LayerCost` that are times."""


class _Numbers(NamedTuple):
    time: float
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    input_bytes: float = 0.0
    output_bytes: float = 0.0
    working_bytes: float = 0.0


class StageCost(_Numbers):
    """What one stage costs.

    time             of one microbatch's computation
    parameter_bytes  uploaded before a run of microbatches
    gradient_bytes   downloaded after it
    input_bytes      uploaded for each microbatch: activations, cotangents
    output_bytes     downloaded for each microbatch: what other stages read
    working_bytes    live on the worker while one microbatch is computed, beside the above

    Numbers are as `LayerCost` has them. Raises PlanError listing every one that is not.
    """

    __slots__ = ()

    def __new__(cls, *numbers: float, **named: float) -> Self:
        """Returns the cost with these fields, in order or by name."""
        self = super().__new__(cls, *map(plain_number, numbers), **{k: plain_number(v) for k, v in named.items()})
        if not all(map(is_size, self)):
            raise PlanError.listing("cost of a stage", size_problems(self._asdict()))
        return self

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]
        return cls(*iterable)  # what `_replace` makes is checked as well


StageCosts = Mapping[tuple[str, int], StageCost]
"""By (kind, stage), for every kind that a stage may be run as: F, X, B and its parts I and W."""


def cost_problems(costs: StageCosts, slots: Collection[tuple[str, int]]) -> list[str]:
    """Returns, in words, what is no cost of those of the slots that have one."""
    return [
        f"{slot} is {shown(costs[slot])}, it must be a StageCost"
        for slot in sorted(slots, key=lambda slot: (slot[1], slot[0]))
        if slot in costs and not isinstance(costs[slot], StageCost)
    ]


def uniform_costs(plan: Plan, forward: float = 1.0, backward: float = 3.0) -> dict[tuple[str, int], StageCost]:
    """Returns costs that are the same for all stages: F `forward`, B and X `backward`, I and W half of that.

    Raises PlanError for what is no time.

    >>> uniform_costs(Plan.parse("F0:1 X1:2 B0:1"))["X", 1].time
    3.0
    """
    problems = size_problems({"forward": forward, "backward": backward})
    if problems:
        raise PlanError.listing("uniform_costs", problems)
    times = {"F": forward, "X": backward, "B": backward, "I": backward / 2, "W": backward / 2}
    return {(kind, stage): StageCost(times[kind]) for kind, stage in _stages(plan)}


def stage_costs(plan: Plan, layers: Sequence[LayerCost]) -> dict[tuple[str, int], StageCost]:
    """Returns what each stage costs: the sum over its layers, and what it exchanges with the host.

    A forward stage downloads its output, and the inputs of backward stages that start inside it. A backward stage
    uploads its input and the cotangent of its output, and downloads the cotangent of its input (layer 0 has no input).
    Raises PlanError if the plan does not cover the layers.

    >>> layers = [LayerCost.of_forward(1.0, parameter_bytes=8, gradient_bytes=8, output_bytes=2)] * 3
    >>> stage_costs(Plan.parse("F0:2 X2:3 B0:1 B1:2"), layers)["F", 0]
    StageCost(time=2.0, parameter_bytes=16, gradient_bytes=0.0, input_bytes=0.0, output_bytes=4, working_bytes=2.0)
    """
    plan.check(len(layers), trained=False)
    kept = _kept(plan)
    spans = {slot: plan.span(*slot) for slot in _stages(plan)}
    return {slot: _stage_cost(layers, slot[0], span, _inside(kept, span)) for slot, span in spans.items()}


def slot_costs_of(layers: Sequence[LayerCost]) -> Callable[[Plan], list[StageCost]]:
    """Returns a function from a plan of these layers to what its slots cost, in order, as `stage_costs` has it.

    For many plans: what they have in common, a kind of stage of the same layers, is added up once.

    >>> found = slot_costs_of([LayerCost.of_forward(1.0)] * 3)(Plan.parse("F0:2 X2:3 B0:1 B1:2"))
    >>> [cost.time for cost in found]
    [2.0, 3.0, 3.0, 3.0]
    """

    @cache
    def cost(kind: str, span: Span, kept: tuple[int, ...]) -> StageCost:
        return _stage_cost(layers, kind, span, kept)

    def costs(plan: Plan) -> list[StageCost]:
        kept = _kept(plan)
        spans = ((kind, plan.span(kind, stage)) for kind, stage in plan.slots)
        return [cost(kind, span, _inside(kept, span) if kind == "F" else ()) for kind, span in spans]

    return costs


def _stages(plan: Plan) -> list[tuple[str, int]]:
    return [(part, stage) for kind, stage in plan.slots for part in (("B", "I", "W") if kind == "B" else (kind,))]


def _kept(plan: Plan) -> list[int]:
    """Returns the layers whose inputs are kept for a stage that starts there, in ascending order."""
    return sorted({span.start for span in (*plan.forward, *plan.backward, plan.fused) if span is not None})


def _inside(kept: Sequence[int], span: Span) -> tuple[int, ...]:
    return tuple(kept[bisect_right(kept, span.start) : bisect_left(kept, span.stop)])


def _stage_cost(layers: Sequence[LayerCost], kind: str, span: Span, kept: Iterable[int]) -> StageCost:
    """Returns the cost of a stage inside of which the inputs of the layers `kept` are kept if it runs forward."""
    own = layers[span.start : span.stop]
    time = {"F": "forward", "X": "fused", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}[kind]
    before = layers[span.start - 1].output_bytes if span.start > 0 else 0.0
    # nothing follows the model's last layer: its output is scored where it is made
    after = own[-1].output_bytes if span.stop < len(layers) else 0.0
    saved = sum(layers[index - 1].output_bytes for index in kept)
    inputs = {"F": before, "X": before, "B": before + after, "I": before + after, "W": before + after}
    outputs = {"F": after + saved, "X": before, "B": before, "I": before, "W": 0.0}
    residuals = sum(layer.residual_bytes for layer in own)
    return StageCost(
        time=sum(getattr(layer, time) for layer in own),
        parameter_bytes=sum(layer.parameter_bytes for layer in own),
        gradient_bytes=sum(layer.gradient_bytes for layer in own) if kind in "XBW" else 0.0,
        input_bytes=inputs[kind],
        output_bytes=outputs[kind],
        working_bytes=max(layer.output_bytes for layer in own) + (0.0 if kind == "F" else residuals),
    )
