"""What a task computes: a pure function of values, the same wherever it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.model import Flat, Model, Params
from rpfunc.objectives.objective import Objective
from rpfunc.plan.plan import Plan, Span
from rpfunc.schedule.task import Task
from rpfunc.schedule.workload import Workload
from rpfunc.stream.flat import requiring, unrequiring
from rpfunc.stream.head import head_value
from rpfunc.stream.layer_major import layer_transpose
from rpfunc.stream.linearize import linearize
from rpfunc.stream.stage import stage_backward, stage_forward, stage_fused, whole_grads
from rpfunc.stream.streaming import Grads, StagePullback, Streaming

Recompute = Literal["stage", "layer", "none"]
"""What is kept between forward and backward: each stage's input, each layer's, or all that backward needs."""


@dataclass(frozen=True)
class Work:
    """What is to be computed: the same for every task of an iteration.

    objective      None: outputs are handed on instead of scored, and there is no backward pass
    compute_dtype  that parameters have where tasks run; None: their own
    """

    model: Model
    objective: Objective | None
    plan: Plan
    streaming: Streaming
    recompute: Recompute
    workload: Workload
    compute_dtype: torch.dtype | None = None

    @property
    def head(self) -> int:
        """The index of the layer whose output is scored, the last one; without an objective, the number of layers."""
        return self.model.num_layers - (self.objective is not None)

    def span(self, task: Task) -> Span:
        """Returns the layers that a task works on."""
        return self.plan.span(task.kind, task.stage)

    def segments(self, task: Task) -> list[Span]:
        """Returns the runs of layers that a task takes forward from a kept input and then backward; F has none.

        A fused pass is one. A layer whose residuals are kept is in none; the head's never are: its forward and backward
        go together, so that logits need not be kept. Residuals serve whole passes only.
        """
        start, stop = self.span(task)
        if task.kind == "F":
            return []
        if task.kind == "X" or self.recompute == "stage" or (self.recompute == "none" and task.kind in "IW"):
            return [Span(start, stop)]
        first = start if self.recompute == "layer" else min(stop, self.head)
        return [Span(layer, layer + 1) for layer in range(first, stop)]

    def subtrees(self, task: Task) -> list[str]:
        """Returns the names of the parameter subtrees that a task reads, each once, in layer order."""
        start, stop = self.span(task)
        return list(dict.fromkeys(name for layer in self.model.layers[start:stop] for name in layer.subtrees))


def adds(task: Task) -> bool:
    """Returns whether a task adds to its stage's gradients: F and I do not."""
    return task.kind in "XBW"


class Inputs(NamedTuple):
    """What a task reads beside parameters and sums.

    activations  by layer index, the input of that layer
    cotangent    of the output of the task's last layer; () at the turn and for F
    batch        the microbatch
    total        (), the loss's denominator
    keep         of which layers F hands on the input; num_layers stands for the model's output
    linearized   of which layers F hands on the pullback
    pullbacks    by layer index, what F has handed on to B
    """

    activations: Mapping[int, Any]
    cotangent: Flat
    batch: Batch
    total: Tensor
    keep: Collection[int] = ()
    linearized: Collection[int] = ()
    pullbacks: Mapping[int, StagePullback] = {}


class Outputs(NamedTuple):
    """What a task hands on: inputs of later layers, pullbacks, a cotangent of its first layer's input, a loss ()."""

    activations: Mapping[int, Any]
    pullbacks: Mapping[int, StagePullback]
    cotangent: Flat | None
    loss: Tensor | None


def perform(work: Work, task: Task, params: Params, inputs: Inputs, sums: Grads) -> tuple[Outputs, Grads]:
    """Returns (outputs, sums with the task's contributions); donates the inputs' cotangent and pullbacks, and `sums`.

    The kinds of tasks, and what they cost in units of a stage's forward, with recomputation:

    F  1  forward; where a plan has no fused stage, the last one scores its output too
    X  3  forward, loss and backward of the last layers
    B  3  backward, from the stage's input; without a fused stage, the last one is as X
    I  3  as B, of which it keeps the cotangent of the stage's input alone
    W  3  as B, of which it keeps the parameters' gradients alone

    I and W are B each, so that they give its bits: torch takes other kernels, which round otherwise, where weights are
    not differentiated. They show a schedule's order, not its gain.
    """
    params = requiring(dict(params))
    if task.kind == "F":
        outputs = _forward(work, task, params, inputs)
        return outputs._replace(activations=unrequiring(dict(outputs.activations))), sums
    if task.kind == "I":
        loss, cotangent, _ = _backward(work, task, params, inputs, {})
        return Outputs({}, {}, cotangent, loss), sums
    start, stop = work.span(task)
    before = whole_grads(work.model.layers[start:stop], params, sums)
    loss, cotangent, added = _backward(work, task, params, inputs, before)
    return Outputs({}, {}, None if task.kind == "W" else cotangent, loss), added


def _forward(work: Work, task: Task, params: Params, inputs: Inputs) -> Outputs:
    (start, stop), how, batch = work.span(task), work.streaming, inputs.batch
    end = min(stop, work.head)
    layers, x = work.model.layers[start:end], inputs.activations[start]
    activations: dict[int, Any] = {}
    pullbacks: dict[int, StagePullback] = {}
    if work.recompute == "none":
        for index, layer in enumerate(layers, start):
            x, pullback = linearize(layer, params, x, batch, how.chunk)
            if index + 1 in inputs.keep:
                activations[index + 1] = x
            if index in inputs.linearized:
                pullbacks[index] = pullback
    else:
        wanted = [index - start for index in range(start + 1, end + 1) if index in inputs.keep or index == end]
        kept = stage_forward(layers, params, x, batch, how, wanted)
        x = kept.get(end - start, x)
        activations = {index + start: value for index, value in kept.items() if index + start in inputs.keep}
    if stop <= work.head or work.objective is None:
        return Outputs(activations, pullbacks, None, None)
    sums = head_value(work.model.layers[-1], work.objective, params, x, batch, how)
    return Outputs(activations, pullbacks, None, work.objective.loss(sums, batch, inputs.total))


def _backward(work: Work, task: Task, params: Params, inputs: Inputs, sums: Grads) -> tuple[Tensor | None, Flat, Grads]:
    """Returns (the loss at the turn, dx, sums with contributions). The turn is the stage with the model's last layer.

    The loss found here replaces the one that a forward stage scored: the same number, whose last bits would depend on
    the plan.
    """
    how, loss, cotangent = work.streaming, None, inputs.cotangent
    activations = dict(inputs.activations)
    for start, stop in reversed(work.segments(task)):
        layers, x = work.model.layers[start:stop], activations.pop(start)
        if stop > work.head and work.objective is not None:
            loss, cotangent, sums = stage_fused(
                layers, work.objective, params, x, inputs.batch, inputs.total, how, sums
            )
        else:
            cotangent, sums = stage_backward(layers, params, x, inputs.batch, how, cotangent, sums)
        del x
    cotangent, sums = layer_transpose([inputs.pullbacks[index] for index in sorted(inputs.pullbacks)], cotangent, sums)
    return loss, cotangent, sums
