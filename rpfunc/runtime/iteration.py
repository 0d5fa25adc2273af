"""One forward and backward pass over a batch: the host's values and what each task does with them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.model import Flat, Model, Params
from rpfunc.objectives.objective import Objective
from rpfunc.plan.plan import Plan, Span
from rpfunc.schedule.task import Task
from rpfunc.schedule.workload import Workload
from rpfunc.stream.flat import accumulate
from rpfunc.stream.head import head_value
from rpfunc.stream.layer_major import layer_transpose
from rpfunc.stream.linearize import linearize
from rpfunc.stream.stage import stage_backward, stage_forward, stage_fused
from rpfunc.stream.streaming import Grads, StagePullback, Streaming


@dataclass(frozen=True)
class Work:
    """What is to be computed: the same for every task of an iteration."""

    model: Model
    objective: Objective
    plan: Plan
    streaming: Streaming
    recompute: bool
    workload: Workload


class Iteration:
    """The stage inputs, cotangents, residuals and gradients of one iteration, as they exist on the host.

    What the kinds of tasks do, and cost in units of a stage's forward, with recomputation:

    F  1  forward; where a plan has no fused stage, the last one scores its output too
    X  3  forward, loss and backward of the last layers
    B  3  backward, from the stage's input; without a fused stage, the last one is as X
    I  3  as B, of which it keeps the cotangent of the stage's input alone
    W  3  as B, of which it keeps the parameters' gradients alone

    I and W are B each, so that they give its bits: torch takes other kernels, which round otherwise, where weights are
    not differentiated. They show a schedule's order, not its gain. Residuals (recompute=False) serve whole passes only.

    `run` is called from many threads; the schedule's dependencies order every two tasks that touch one entry, so
    no lock is needed: the gradients of a stage and a block are written by their own tasks alone, in microbatch order.
    """

    def __init__(self, work: Work, params: Params, microbatches: Sequence[Batch], total: Tensor) -> None:
        self._work, self._params, self._microbatches, self._total = work, params, microbatches, total
        self._head = work.model.num_layers - 1
        reads = [(self._first(task), task) for task in work.workload.tasks]
        # of each (layer, microbatch): how many tasks will read its input, and whether its residuals are kept
        self._readers = Counter((first, task.microbatch) for first, task in reads if first < self._span(task).stop)
        self._kept = {
            (layer, task.microbatch) for first, task in reads for layer in range(self._span(task).start, first)
        }
        self._inputs: dict[tuple[int, int], tuple[Any, int]] = {}
        self._pullbacks: dict[tuple[int, int], StagePullback] = {}
        self._cotangents: dict[int, Flat] = {}
        self._held: dict[tuple[int, int], Flat] = {}
        self._losses: list[Tensor] = [torch.empty(0)] * len(microbatches)
        self._grads: dict[tuple[str, int, int], Grads] = {}

    def run(self, task: Task) -> None:
        """Does one task's work; what the task depends on must have been done."""
        {"F": self._forward, "I": self._input_gradient, "W": self._weight_gradient}.get(task.kind, self._whole)(task)

    def loss(self) -> Tensor:
        """Returns the sum of the microbatches' losses, in order: (), float64."""
        return torch.stack([loss.double() for loss in self._losses]).sum()

    def grads(self) -> dict[str, Any]:
        """Returns the gradients, with the structure of the parameters, float32 or wider; blocks are added in order."""
        by_layer: dict[str, Flat] = {}
        for place in sorted(self._grads, key=lambda place: place[2]):
            for name, flat in self._grads[place].items():
                by_layer[name] = accumulate(by_layer.get(name), flat)
        return self._work.model.sum_grads([by_layer.get(layer.name) for layer in self._work.model.layers], self._params)

    def _forward(self, task: Task) -> None:
        work, how, m = self._work, self._work.streaming, task.microbatch
        start, stop = self._span(task)
        end = min(stop, self._head)
        layers, x, batch = work.model.layers[start:end], self._take(start, m), self._microbatches[m]
        if work.recompute:
            keep = [index - start for index in range(start + 1, end + 1) if index == end or (index, m) in self._readers]
            kept = stage_forward(layers, self._params, x, batch, how, keep)
            for index, value in kept.items():
                self._put(start + index, m, value)
            x = kept.get(end - start, x)
        else:
            for index, layer in enumerate(layers, start):
                x, pullback = linearize(layer, self._params, x, batch, how.chunk)
                self._put(index + 1, m, x)
                if (index, m) in self._kept:
                    self._pullbacks[index, m] = pullback
        if stop > self._head:
            sums = head_value(work.model.layers[-1], work.objective, self._params, x, batch, how)
            self._losses[m] = work.objective.loss(sums, batch, self._total)

    def _whole(self, task: Task) -> None:
        cotangent, place = self._cotangents.pop(task.microbatch, ()), self._place(task)
        self._cotangents[task.microbatch], self._grads[place] = self._backward(
            task, cotangent, self._grads.get(place, {})
        )

    def _input_gradient(self, task: Task) -> None:
        stage, _, m = task
        self._held[stage, m] = self._cotangents.pop(m, ())
        self._cotangents[m], _ = self._backward(task, _copy(self._held[stage, m]), {})

    def _weight_gradient(self, task: Task) -> None:
        cotangent, place = self._held.pop((task.stage, task.microbatch)), self._place(task)
        _, self._grads[place] = self._backward(task, cotangent, self._grads.get(place, {}))

    def _backward(self, task: Task, cotangent: Flat, grads: Grads) -> tuple[Flat, Grads]:
        """Returns (dx, grads with contributions) of a stage; donates both. The turn finds its cotangent, and the loss.

        The turn is the stage with the model's last layer. The loss found here replaces the one that a forward stage
        scored: the same number, whose last bits would depend on the plan.
        """
        work, how, m = self._work, self._work.streaming, task.microbatch
        (start, stop), first = self._span(task), self._first(task)
        layers, batch = work.model.layers[first:stop], self._microbatches[m]
        if layers:
            x = self._take(first, m)
            if stop > self._head:
                self._losses[m], cotangent, grads = stage_fused(
                    layers, work.objective, self._params, x, batch, self._total, how, grads
                )
            else:
                cotangent, grads = stage_backward(layers, self._params, x, batch, how, cotangent, grads)
        pullbacks = [self._pullbacks.pop((index, m)) for index in range(start, first)]
        return layer_transpose(pullbacks, cotangent, grads)

    def _span(self, task: Task) -> Span:
        return self._work.plan.span(task.kind, task.stage)

    def _first(self, task: Task) -> int:
        """Returns the layer from which a task runs its stage forward: the stage's end if all residuals are kept.

        The head's never are: its forward and backward go together, so that logits need not be kept.
        """
        start, stop = self._span(task)
        return min(stop, self._head) if task.kind == "B" and not self._work.recompute else start

    def _place(self, task: Task) -> tuple[str, int, int]:
        """Returns which gradients a task adds to: its stage's, of its microbatch's block."""
        block = bisect_right(self._work.workload.block_starts, task.microbatch) - 1
        return "X" if task.kind == "X" else "B", task.stage, block

    def _take(self, layer: int, m: int) -> Any:
        """Returns the input of `layer`, and lets go of it if this was its last reader; layer 0 has none."""
        if layer == 0:
            return ()
        value, readers = self._inputs[layer, m]
        if readers == 1:
            del self._inputs[layer, m]
        else:
            self._inputs[layer, m] = value, readers - 1
        return value

    def _put(self, layer: int, m: int, value: Any) -> None:
        """Keeps the input of `layer` if any task will read it."""
        if (layer, m) in self._readers:
            self._inputs[layer, m] = value, self._readers[layer, m]


def _copy(cotangent: Flat) -> Flat:
    """Returns copies with the same strides: torch may add up the numbers of another layout in another order."""
    return tuple(map(_copy_leaf, cotangent))


def _copy_leaf(leaf: Tensor) -> Tensor:
    storage = leaf.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return leaf.new_empty(0).set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())
