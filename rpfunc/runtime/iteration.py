"""The host's values of one forward and backward pass over a batch: what tasks read and hand on."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.model import Flat, Params
from rpfunc.runtime.tasks import Inputs, Outputs, Work, adds
from rpfunc.runtime.trace import Recorder
from rpfunc.schedule.task import Task
from rpfunc.stream.streaming import Grads, StagePullback

Place = tuple[str, int, int]
"""Which gradients a task adds to: X or B, the stage, and the block of the microbatch."""


class Iteration:
    """Stage inputs, cotangents, residuals and sums of gradients, as they exist on the host.

    Called from many threads: the schedule's dependencies order every two tasks that touch one entry, so no lock is
    needed. The gradients of a stage and a block are written by their own tasks alone, in microbatch order.

    params           by name, the subtrees of the version that this iteration reads; may be filled while it goes on
    number, version  of the iteration, and of the parameters that it reads, for the record
    """

    def __init__(
        self,
        work: Work,
        params: Params,
        microbatches: Sequence[Batch],
        total: Tensor,
        recorder: Recorder | None = None,
        number: int = 0,
        version: int = 0,
    ) -> None:
        self.work, self.params, self.total = work, params, total
        self._recorder, self._number, self._version = recorder or Recorder(False), number, version
        self._microbatches = microbatches
        tasks = work.workload.tasks
        # of each (layer, microbatch): how many tasks will read its input, and whether its residuals are kept
        self._readers = Counter((first, task.microbatch) for task in tasks for first in _read(work, task))
        if work.objective is None:
            self._readers.update((work.model.num_layers, m) for m in range(len(microbatches)))  # `outputs`
        self._kept = {(layer, task.microbatch) for task in tasks for layer in _transposed(work, task)}
        places = {self.place(task): work.span(task) for task in tasks if adds(task)}
        self._places = [
            sorted((place for place, span in places.items() if place and layer in range(*span)), key=lambda p: p[2])
            for layer in range(work.model.num_layers)
        ]
        self._activations: dict[tuple[int, int], tuple[Any, int]] = {}
        self._pullbacks: dict[tuple[int, int], StagePullback] = {}
        self._cotangents: dict[int, Flat] = {}
        self._held: dict[tuple[int, int], Flat] = {}
        self._losses: list[Tensor] = [torch.empty(0)] * len(microbatches)
        self._sums: dict[Place, Grads] = {}

    def inputs(self, task: Task) -> Inputs:
        """Returns what a task reads; what nothing else will read is let go of."""
        m, (start, stop) = task.microbatch, self.work.span(task)
        for layer in _transposed(self.work, task):
            self._recorder.read("residuals", self._number, layer, m)
        layers = range(start + 1, stop + 1)
        return Inputs(
            {layer: self._take(layer, m) for layer in _read(self.work, task)},
            self._cotangent(task),
            self._microbatches[m],
            self.total,
            keep=[layer for layer in layers if (layer, m) in self._readers] if task.kind == "F" else (),
            linearized=[layer for layer in range(start, stop) if (layer, m) in self._kept] if task.kind == "F" else (),
            pullbacks={layer: self._pullbacks.pop((layer, m)) for layer in _transposed(self.work, task)},
        )

    def store(self, task: Task, outputs: Outputs) -> None:
        """Keeps what a task hands on."""
        m = task.microbatch
        for layer, value in outputs.activations.items():
            self._recorder.write("activation", self._number, layer, m)
            self._activations[layer, m] = value, self._readers[layer, m]
        for layer, pullback in outputs.pullbacks.items():
            self._recorder.write("residuals", self._number, layer, m)
            self._pullbacks[layer, m] = pullback
        if outputs.cotangent is not None:
            self._recorder.write("cotangent", self._number, m)
            self._cotangents[m] = outputs.cotangent
        if outputs.loss is not None:
            self._recorder.write("loss", self._number, m)
            self._losses[m] = outputs.loss

    def subtrees(self, tasks: Sequence[Task]) -> Params:
        """Returns the parameter subtrees that any of the tasks reads."""
        names = {name for task in tasks for name in self.work.subtrees(task)}
        for name in names:
            self._recorder.read("main", self._version, name)
        return {name: self.params[name] for name in names}

    def place(self, task: Task) -> Place | None:
        """Returns which gradients a task adds to; None: to none."""
        if not adds(task):
            return None
        block = bisect_right(self.work.workload.block_starts, task.microbatch) - 1
        return "X" if task.kind == "X" else "B", task.stage, block

    def sums(self, place: Place | None) -> Grads:
        """Returns the sums so far, nothing before the first task of a place."""
        if place is None:
            return {}
        self._recorder.read("sums", self._number, place)
        return self._sums.get(place, {})

    def store_sums(self, place: Place | None, sums: Grads) -> None:
        """Keeps the sums with another task's contributions."""
        if place is not None:
            self._recorder.write("sums", self._number, place)
            self._sums[place] = sums

    def loss(self) -> Tensor:
        """Returns the sum of the microbatches' losses, in order: (), float64."""
        return torch.stack([loss.double() for loss in self._losses]).sum()

    def outputs(self) -> list[Any]:
        """Returns each microbatch's output of the model, where there is no objective; to be asked for once."""
        return [self._take(self.work.model.num_layers, m) for m in range(len(self._microbatches))]

    def gradient(self, name: str) -> Any:
        """Returns the gradient of a subtree, float32 or wider, once all tasks that add to it have ended.

        Blocks are added in order, then layers. To be asked for once: sums are donated to it.
        """
        layers = self.work.model.layers
        by_layer = []
        for index, layer in enumerate(layers):
            places = self._places[index] if name in layer.subtrees else ()
            by_layer.append([self.sums(place)[layer.name] for place in places if layer.name in self.sums(place)])
        return self.work.model.sum_grad(name, by_layer, self.params)

    def grads(self) -> dict[str, Any]:
        """Returns the gradients, with the structure of the parameters."""
        return {name: self.gradient(name) for name in self.params}

    def _cotangent(self, task: Task) -> Flat:
        """Returns the cotangent that a task may overwrite; that of I stays for its W."""
        stage, kind, m = task
        if kind == "F":
            return ()
        if kind in "IW":
            self._recorder.write("held cotangent", self._number, stage, m)
        if kind == "W":
            return self._held.pop((stage, m))
        self._recorder.write("cotangent", self._number, m)
        cotangent = self._cotangents.pop(m, ())
        if kind == "I":
            self._held[stage, m] = cotangent
            return _copy(cotangent)
        return cotangent

    def _take(self, layer: int, m: int) -> Any:
        """Returns the input of `layer`, and lets go of it if this was its last reader; layer 0 has none."""
        if layer == 0:
            return ()
        self._recorder.read("activation", self._number, layer, m)
        value, readers = self._activations[layer, m]
        if readers == 1:
            del self._activations[layer, m]
        else:
            self._activations[layer, m] = value, readers - 1
        return value


def _read(work: Work, task: Task) -> list[int]:
    """Returns the layers whose inputs a task reads."""
    return [work.span(task).start] if task.kind == "F" else [segment.start for segment in work.segments(task)]


def _transposed(work: Work, task: Task) -> range:
    """Returns the layers of a task whose kept pullbacks it calls."""
    (start, stop), segments = work.span(task), work.segments(task)
    return range(0) if task.kind == "F" else range(start, segments[0].start if segments else stop)


def _copy(cotangent: Flat) -> Flat:
    """Returns copies with the same strides: torch may add up the numbers of another layout in another order."""
    return tuple(map(_copy_leaf, cotangent))


def _copy_leaf(leaf: Tensor) -> Tensor:
    storage = leaf.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return leaf.new_empty(0).set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())
