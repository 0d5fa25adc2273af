"""Costs measured by running: from a timeline to layer costs, to a file and back, and whether they still hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path

from rpfunc.errors import PlanError
from rpfunc.files import replace_file
from rpfunc.plan.checks import size_problems
from rpfunc.plan.costs import TIMES, LayerCost, stage_costs
from rpfunc.plan.plan import Plan
from rpfunc.schedule.timeline import Timeline


def profile_costs(timeline: Timeline, plan: Plan, sizes: Sequence[LayerCost] | None = None) -> list[LayerCost]:
    """Returns layer costs measured by a run of stages of one layer each: medians over its microbatches.

    What did not run is told by what did: a forward takes a third of a fused pass, a backward as long as a fused pass,
    its halves, or three forwards, and its input gradient two thirds of it.
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


def save_costs(path: str | Path, costs: Sequence[LayerCost]) -> None:
    """Writes layer costs as JSON: a list of objects with the fields of `LayerCost`. Written beside, then renamed."""
    import msgspec  # here, since it takes a while and few runs read or write costs

    text = msgspec.json.format(msgspec.json.encode([asdict(cost) for cost in costs])) + b"\n"
    replace_file(Path(path), lambda beside: beside.write_bytes(text))


def load_costs(path: str | Path) -> list[LayerCost]:
    """Returns what `save_costs` wrote, or somebody by hand; sizes may be left out.

    Raises PlanError for a file that cannot be read or is no such list, listing every layer's faults.
    """
    import msgspec

    try:
        layers = msgspec.json.decode(Path(path).read_bytes(), type=list[dict[str, float]])
    except OSError as error:
        raise PlanError(f"costs in {path}: cannot read it: {error.strerror}") from error
    except ValueError as error:  # no JSON, not UTF-8, or something else than numbers
        raise PlanError(f"costs in {path}: {error}; needs a list of layers, each an object of numbers") from error
    known = {field.name: field.default is MISSING for field in fields(LayerCost)}
    problems = [
        f"layer {index} {verb} {name!r}"
        for index, layer in enumerate(layers)
        for verb, names in (
            ("has the unknown field", layer.keys() - known.keys()),
            ("lacks", {name for name, needed in known.items() if needed} - layer.keys()),
        )
        for name in sorted(names)
    ]
    problems += [f"layer {index}: {problem}" for index, layer in enumerate(layers) for problem in size_problems(layer)]
    if problems:
        raise PlanError.listing(f"costs in {path}", problems)
    return [LayerCost(**layer) for layer in layers]


def _slot_times(timeline: Timeline) -> dict[tuple[str, int], float]:
    """Returns the median time of each kind and stage over its microbatches, of two in the middle the shorter."""
    times = defaultdict(list)
    for event in timeline.events:
        if event.channel == "compute":
            times[event.task.kind, event.task.stage].append(event.end_s - event.start_s)
    return {slot: sorted(found)[(len(found) - 1) // 2] for slot, found in times.items()}


def _layer_cost(times: Mapping[str, float]) -> LayerCost:
    forward = times["F"] if "F" in times else times["X"] / 3
    halves = times["I"] + times["W"] if {"I", "W"} <= times.keys() else 3 * forward
    backward = times.get("B", times.get("X", halves))
    fused = times.get("X", backward)
    return LayerCost(forward, backward, fused, times.get("I", 2 * backward / 3), times.get("W", backward / 3))
