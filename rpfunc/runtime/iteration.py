"""One forward and backward pass over a batch: the host's values and what each task does with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.model import Flat, Model, Params
from rpfunc.objectives.objective import Objective
from rpfunc.plan.plan import Plan
from rpfunc.schedule.task import Task
from rpfunc.stream.form import Pullback
from rpfunc.stream.layer_major import layer_linearize, layer_transpose
from rpfunc.stream.stage import stage_backward, stage_forward, stage_fused
from rpfunc.stream.streaming import Grads, Streaming


@dataclass(frozen=True)
class Work:
    """What is to be computed: the same for every task of an iteration."""

    model: Model
    objective: Objective
    plan: Plan
    streaming: Streaming
    recompute: bool


class Iteration:
    """The stage inputs, cotangents, residuals and gradients of one iteration, as they exist on the host.

    `run` is called from many threads; the schedule's dependencies order every two tasks that touch one entry, so
    no lock is needed: a stage's gradients are written by its own tasks alone, in microbatch order.
    """

    def __init__(self, work: Work, params: Params, microbatches: Sequence[Batch], total: Tensor) -> None:
        self._work, self._params, self._microbatches, self._total = work, params, microbatches, total
        plan = work.plan
        backward_starts = [span.start for span in plan.backward] if work.recompute else []
        starts = [span.start for span in plan.forward] + [plan.fused.start] + backward_starts
        # How many stages will read a layer's input; layer 0 has none.
        self._readers = {start: count for start, count in Counter(starts).items() if start > 0}
        self._inputs: dict[tuple[int, int], tuple[Any, int]] = {}
        self._pullbacks: dict[tuple[int, int], Pullback] = {}
        self._cotangents: dict[int, Flat] = {}
        self._losses: list[Tensor] = [torch.empty(0)] * len(microbatches)
        self._grads: dict[tuple[str, int], Grads] = {slot: {} for slot in plan.slots}

    def run(self, task: Task) -> None:
        """Does one task's work; what the task depends on must have been done."""
        {"F": self._forward, "X": self._fused, "B": self._backward}[task.kind](task)

    def loss(self) -> Tensor:
        """Returns the sum of the microbatches' losses, in order: (), float64."""
        return torch.stack([loss.double() for loss in self._losses]).sum()

    def grads(self) -> dict[str, Any]:
        """Returns the gradients, with the structure of the parameters, float32 or wider."""
        by_layer = {name: flat for grads in self._grads.values() for name, flat in grads.items()}
        return self._work.model.sum_grads([by_layer.get(layer.name) for layer in self._work.model.layers], self._params)

    def _forward(self, task: Task) -> None:
        work, how, m = self._work, self._work.streaming, task.microbatch
        start, stop = work.plan.span(task.kind, task.stage)
        layers, x, batch = work.model.layers[start:stop], self._take(start, m), self._microbatches[m]
        if work.recompute:
            keep = [index - start for index in self._readers if start < index <= stop]
            for index, value in stage_forward(layers, self._params, x, batch, how, keep).items():
                self._put(start + index, m, value)
            return
        x, pullbacks = layer_linearize(layers, self._params, x, batch, how.chunk)
        self._put(stop, m, x)
        self._pullbacks.update({(start + index, m): pullback for index, pullback in enumerate(pullbacks)})

    def _fused(self, task: Task) -> None:
        work, m = self._work, task.microbatch
        start, stop = work.plan.fused
        self._losses[m], self._cotangents[m], self._grads[task.kind, task.stage] = stage_fused(
            work.model.layers[start:stop],
            work.objective,
            self._params,
            self._take(start, m),
            self._microbatches[m],
            self._total,
            work.streaming,
            self._grads[task.kind, task.stage],
        )

    def _backward(self, task: Task) -> None:
        work, how, m, slot = self._work, self._work.streaming, task.microbatch, (task.kind, task.stage)
        start, stop = work.plan.span(task.kind, task.stage)
        layers, cotangent, grads = work.model.layers[start:stop], self._cotangents.pop(m), self._grads[slot]
        if not work.recompute:
            pullbacks = [self._pullbacks.pop((index, m)) for index in range(start, stop)]
            dx, grads = layer_transpose(layers, pullbacks, cotangent, grads)
        else:
            x, batch = self._take(start, m), self._microbatches[m]
            dx, grads = stage_backward(layers, self._params, x, batch, how, cotangent, grads)
        self._cotangents[m], self._grads[slot] = dx, grads

    def _take(self, layer: int, m: int) -> Any:
        """Returns the input of `layer`, and lets go of it if this was its last reader."""
        if layer == 0:
            return ()
        value, readers = self._inputs[layer, m]
        if readers == 1:
            del self._inputs[layer, m]
        else:
            self._inputs[layer, m] = value, readers - 1
        return value

    def _put(self, layer: int, m: int, value: Any) -> None:
        """Keeps the input of `layer` if a stage starts there."""
        if layer in self._readers:
            self._inputs[layer, m] = value, self._readers[layer]
