"""From how many sequences on the transfers of a slot hide behind its computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rpfunc.checks import count_problems
from rpfunc.errors import PlanError
from rpfunc.plan.costs import LayerCost, StageCost, stage_costs
from rpfunc.plan.decoders import DecoderShape, decoder_costs
from rpfunc.plan.hardware import Hardware
from rpfunc.plan.plan import Plan
from rpfunc.plan.presets import Machine, machine


class Roofline(NamedTuple):
    """The fewest microbatches of a run (a slot's microbatches on a worker) from which computation takes longest.

    By the kind of slot, for the layer that needs most; infinite where each microbatch's own transfers take longer than
    its computation. A run moves parameters and gradients once, so that a microbatch is the smaller the more there are.
    """

    forward: float
    fused: float
    backward: float

    @property
    def run(self) -> float:
        """For slots of every kind."""
        return max(self)


def roofline(layers: Sequence[LayerCost], hardware: Hardware, num_workers: int = 1) -> Roofline:
    """Returns the roofline of layers, each a slot of its own: the last fused, the others forward and backward.

    Larger slots need no more, as they move fewer activations for the same computation. Layers without computation (a
    look-up) never hide their own transfers and are left out: their neighbours' computation does. Source: own, after
    RoundPipe (arXiv 2604.27085), roofline analysis. Raises PlanError for no layer and no worker.

    >>> layers = [LayerCost.of_forward(1.0, parameter_bytes=60.0, gradient_bytes=60.0, output_bytes=2.0)] * 3
    >>> roofline(layers, Hardware(upload=8.0, download=8.0))
    Roofline(forward=10, fused=3, backward=3)
    """
    problems = count_problems({"num_workers": num_workers})
    if problems:
        raise PlanError.listing("roofline", problems)
    starts = range(len(layers))
    plan = Plan.cut(len(layers), starts, starts) if len(layers) > 1 else Plan.single(1)
    costs = stage_costs(plan, layers)
    runs = dict.fromkeys("FXB", 0.0)
    for kind, stage in plan.slots:
        if costs[kind, stage].time > 0:
            runs[kind] = max(runs[kind], smallest_run(costs[kind, stage], hardware, num_workers))
    return Roofline(*runs.values())


def smallest_run(cost: StageCost, hardware: Hardware, num_workers: int = 1) -> float:
    """Returns the fewest microbatches for which a stage's transfers take no longer than its computation, each way.

    n microbatches take n * time, and move bytes of the run + n * bytes of a microbatch; all workers transfer at once.
    """
    upload = min(hardware.upload, hardware.host_upload / num_workers)
    download = min(hardware.download, hardware.host_download / num_workers)
    ways = [(cost.parameter_bytes, cost.input_bytes, upload), (cost.gradient_bytes, cost.output_bytes, download)]
    return max(_smallest(cost.time, once / rate, each / rate) for once, each, rate in ways)


def roofline_table(
    shapes: Sequence[DecoderShape], machines: Sequence[str], rows: int = 2048, *, efficiency: float = 0.75
) -> list[tuple[str, str, Roofline]]:
    """Returns (model, machine, roofline) for each of both: sequences of `rows` in a run, a microbatch being one."""
    named = [(name, machine(name, efficiency=efficiency)) for name in machines]
    return [(shape.name, name, decoder_roofline(shape, found, rows)) for shape in shapes for name, found in named]


def decoder_roofline(shape: DecoderShape, machine: Machine, rows: int = 2048) -> Roofline:
    """Returns how many sequences of `rows` a run needs; with M microbatches, each has that number / M at least."""
    costs = decoder_costs(shape, rows, flops_per_s=machine.flops_per_s)
    return roofline(costs, machine.hardware, machine.num_workers)


def _smallest(time: float, once: float, each: float) -> float:
    if once == 0:
        return 1 if each <= time else math.inf
    fewest = once / (time - each) if each < time else math.inf
    return max(1, math.ceil(fewest)) if fewest < math.inf else math.inf
