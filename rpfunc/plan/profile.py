"""Costs measured by running: from a timeline to layer costs, and whether they still hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rpfunc.errors import PlanError
from rpfunc.plan.costs import TIMES, LayerCost, stage_costs
from rpfunc.plan.plan import Plan
from rpfunc.schedule.timeline import Timeline


def profile_costs(timeline: Timeline, plan: Plan, sizes: Sequence[LayerCost] | None = None) -> list[LayerCost]:
    """Returns layer costs measured by a run of stages of one layer each: medians over its microbatches.

    A profile states what the runtime takes. Its I and W each run the whole backward, so a backward that ran in halves
    alone takes as long as the longer half, and a half that did not run as long as the backward. What else did not run
    is told by what did: a forward takes a third of a fused pass, a backward as long as a fused pass, or three forwards.
    sizes  costs whose bytes are taken over; None: nothing has a size
    Unit: the timeline's, seconds for a real run. Raises PlanError listing stages of more than one layer, and layers
    that never ran.

    >>> from rpfunc.schedule import Schedule, simulate
    >>> plan = Plan.parse("F0:1 X1:2 B0:1")
    >>> costs = stage_costs(plan, [LayerCost.of_forward(2.0), LayerCost.of_forward(5.0)])
    >>> [cost.forward for cost in profile_costs(simulate(Schedule.parse("0F0 1X0 0B0"), costs), plan)]
    [2.0, 5.0]
    """
    layers: list[dict[str, float]] = [{} for _ in range(plan.num_layers)]
    problems = []
    for (kind, stage), time in _slot_times(timeline).items():
        span = plan.span(kind, stage)
        layers[span.start][kind] = time
        if span.stop - span.start != 1:
            problems.append(f"stage {stage}{kind} has layers {span}, it must have one")
    if not problems:
        problems = [
            f"layer {index} ran neither forward nor fused"
            for index, times in enumerate(layers)
            if not {"F", "X"} & times.keys()
        ]
    if sizes is not None and len(sizes) != plan.num_layers:
        problems.append(f"sizes are of {len(sizes)} layers, the plan has {plan.num_layers}")
    if problems:
        raise PlanError.listing(f"profile of plan '{plan}'", problems)
    costs = [_layer_cost(times) for times in layers]
    if sizes is None:
        return costs
    return [
        replace(size, **{name: getattr(cost, name) for name in TIMES}) for size, cost in zip(sizes, costs, strict=True)
    ]


def drift(costs: Sequence[LayerCost], timeline: Timeline, plan: Plan) -> float:
    """Returns how far slots have drifted from what costs predict: the largest difference / the slowest slot predicted.

    The prediction is scaled so that all slots that ran take as long as measured: a machine that has become slower as a
    whole needs no other plan. 0 is no drift; 0.1 says that a plan's slowest slot may be off by 10%. Raises PlanError
    where the costs do not fit the plan.
    """
    measured, costs_of = _slot_times(timeline), stage_costs(plan, costs)
    unknown = sorted((stage, kind) for kind, stage in measured.keys() - costs_of.keys())
    if unknown:
        ran = [f"ran stage {stage}{kind}" for stage, kind in unknown]
        raise PlanError.listing(f"drift: the timeline is of another plan than '{plan}'", ran)
    predicted = {slot: costs_of[slot].time for slot in measured}
    total = sum(predicted.values())
    if not total:
        return 0.0
    scale = sum(measured.values()) / total
    slowest = max(predicted.values())
    return max(abs(measured[slot] / scale - time) for slot, time in predicted.items()) / slowest if scale else 0.0


def _slot_times(timeline: Timeline) -> dict[tuple[str, int], float]:
    """Returns the median time of each kind and stage over its microbatches, of two in the middle the shorter."""
    times = defaultdict(list)
    for event in timeline.events:
        if event.channel == "compute":
            times[event.task.kind, event.task.stage].append(event.end_s - event.start_s)
    return {slot: sorted(found)[(len(found) - 1) // 2] for slot, found in times.items()}


def _layer_cost(times: Mapping[str, float]) -> LayerCost:
    forward = times["F"] if "F" in times else times["X"] / 3
    halves = [times[kind] for kind in "IW" if kind in times]
    whole = max(halves, default=times.get("X", 3 * forward))
    backward = times.get("B", whole)
    return LayerCost(forward, backward, times.get("X", backward), times.get("I", backward), times.get("W", backward))
