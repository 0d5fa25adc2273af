"""Doing one operation: a task on the host's own values, or moving values to a device, computing there, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.storage import UntypedStorage

from rpfunc import tree
from rpfunc.meter import Following, Meter
from rpfunc.model import Params
from rpfunc.runtime.device import Device
from rpfunc.runtime.iteration import Iteration, Place
from rpfunc.runtime.operations import BEHIND, Operation
from rpfunc.runtime.room import tensors_of, values_of
from rpfunc.runtime.tasks import Inputs, Outputs, perform
from rpfunc.runtime.trace import Recorder
from rpfunc.runtime.waiting import never
from rpfunc.schedule.task import Task
from rpfunc.stream.freeze import Frozen, cast
from rpfunc.stream.streaming import Grads

Run = tuple[Task, ...]


class Buffers:
    """What one worker's device holds of an iteration: of two runs and two tasks at most."""

    def __init__(self) -> None:
        self.params: dict[Run, Params] = {}
        self.sums: dict[Run, Grads] = {}
        self.inputs: dict[Task, Inputs] = {}
        self.outputs: dict[Task, Outputs] = {}


class Execution:
    """Performs the operations of one iteration on the devices of its workers (None: the host's own memory).

    Buffers are handed over before their copy is complete: only events say when they may be read.

    check  raises if the iteration has failed: what may take long calls it now and then
    """

    def __init__(
        self,
        iteration: Iteration,
        devices: Sequence[Device | None],
        recorder: Recorder | None = None,
        meters: Sequence[Meter | None] | None = None,
        check: Callable[[], None] = never,
    ) -> None:
        self._iteration, self._devices, self._recorder = iteration, devices, recorder or Recorder(False)
        self._check = check
        self._buffers = [Buffers() for _ in devices]
        self._meters = [None] * len(devices) if meters is None else meters

    def __call__(self, operation: Operation) -> None:
        """Does the work of one operation; what it waits for has happened."""
        device, buffers = self._devices[operation.worker], self._buffers[operation.worker]
        if device is None:
            self._on_host(operation, buffers)
        else:
            getattr(self, f"_{operation.channel}")(operation, device, buffers)
            _check_room(operation.worker, buffers)

    def _on_host(self, operation: Operation, buffers: Buffers) -> None:
        iteration, (task, run) = self._iteration, operation[2:4]
        place, dtype = iteration.place(task), iteration.work.compute_dtype
        if task == run[0]:
            params = iteration.subtrees(run)
            with self._following(operation.worker):
                buffers.params[run] = params if dtype is None else tree.map(lambda leaf: cast(leaf, dtype), params)
        params, meter = buffers.params[run], self._meters[operation.worker]
        with self._following(operation.worker):
            outputs, sums = perform(iteration.work, task, params, iteration.inputs(task), iteration.sums(place))
        if task == run[-1]:
            del buffers.params[run]
        if meter is not None:  # all else that lives is the host's from here on, what pullbacks hold too
            meter.hand_over(_storages(buffers.params))
        iteration.store(task, outputs)
        iteration.store_sums(place, sums)

    def _parameter_upload(self, operation: Operation, device: Device, buffers: Buffers) -> None:
        run, iteration = operation.run, self._iteration
        dtype = iteration.work.compute_dtype
        params, sums = iteration.subtrees(run), iteration.sums(self._place(run))
        with self._following(operation.worker):
            buffers.params[run] = tree.map(lambda leaf: _allocate(device, leaf, dtype), params)
            buffers.sums[run] = tree.map(lambda leaf: _allocate(device, leaf), dict(sums))
        self._recorder.write("device parameters", operation.worker, operation.side)
        self._recorder.write("device sums", operation.worker, operation.side)
        self._copy(device, (buffers.params[run], buffers.sums[run]), (params, dict(sums)), operation.channel)

    def _activation_upload(self, operation: Operation, device: Device, buffers: Buffers) -> None:
        host = self._iteration.inputs(operation.task)
        with self._following(operation.worker):
            target = buffers.inputs[operation.task] = _map(lambda leaf: _allocate(device, leaf), host)
        self._recorder.write("device inputs", operation.worker, operation.place)
        self._copy(device, values_of(target), values_of(host), operation.channel)

    def _compute(self, operation: Operation, device: Device, buffers: Buffers) -> None:
        task, run = operation.task, operation.run
        self._recorder.write("device inputs", operation.worker, operation.place)  # their cotangent is donated
        self._recorder.read("device parameters", operation.worker, operation.side)
        self._recorder.write("device sums", operation.worker, operation.side)
        self._recorder.write("device outputs", operation.worker, operation.place)
        inputs, params, work = buffers.inputs[task], buffers.params[run], self._iteration.work

        def compute() -> tuple[Outputs, Grads]:
            with self._following(operation.worker):
                outputs, sums = perform(work, task, params, inputs, buffers.sums[run])
                # a layer may hand on a parameter: what lives on must not be taken away with the parameters
                lent = _storages(params) | _storages(sums)
                return tree.map(lambda leaf: leaf.clone() if leaf.untyped_storage() in lent else leaf, outputs), sums

        buffers.outputs[task], buffers.sums[run] = device.run(compute)
        del buffers.inputs[task]
        kept = _storages((buffers.outputs[task], buffers.sums[run]))
        done = tensors_of(values_of(inputs))
        if task == run[-1]:
            done += tensors_of(buffers.params.pop(run))
            if self._place(run) is None:
                del buffers.sums[run]
        device.release([leaf for leaf in done if leaf.untyped_storage() not in kept])

    def _activation_download(self, operation: Operation, device: Device, buffers: Buffers) -> None:
        self._recorder.read("device outputs", operation.worker, operation.place)
        outputs = buffers.outputs[operation.task]
        host = tree.map(device.allocate_on_host, outputs)
        self._iteration.store(operation.task, host)
        self._copy(device, host, outputs, operation.channel)
        device.release(tensors_of(buffers.outputs.pop(operation.task)))

    def _gradient_download(self, operation: Operation, device: Device, buffers: Buffers) -> None:
        self._recorder.read("device sums", operation.worker, operation.side)
        sums = buffers.sums[operation.run]
        host = tree.map(device.allocate_on_host, sums)
        self._iteration.store_sums(self._place(operation.run), host)
        self._copy(device, host, sums, operation.channel)
        device.release(tensors_of(buffers.sums.pop(operation.run)))

    def _copy(self, device: Device, targets: Any, sources: Any, channel: str) -> None:
        for target, source in zip(tensors_of(targets), tensors_of(sources), strict=True):
            device.copy(target, source, channel, self._check)

    def _following(self, worker: int) -> AbstractContextManager[Any]:
        meter = self._meters[worker]
        return nullcontext() if meter is None else Following(meter)

    def _place(self, run: Run) -> Place | None:
        return next((place for place in map(self._iteration.place, run) if place is not None), None)


def _check_room(worker: int, buffers: Buffers) -> None:
    """Raises if a worker holds more than its operations should ever let it."""
    for what, held in vars(buffers).items():
        if len(held) > BEHIND:
            raise RuntimeError(f"worker {worker} holds {what} of {len(held)} tasks or runs at once, {BEHIND} have room")


def _allocate(device: Device, leaf: Any, dtype: torch.dtype | None = None) -> Any:
    if isinstance(leaf, Frozen):
        return Frozen(_allocate(device, leaf.tensor, dtype))
    return device.allocate(leaf, dtype or leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _map(function: Callable[[Any], Any], inputs: Inputs) -> Inputs:
    return inputs._replace(
        activations=tree.map(function, dict(inputs.activations)),
        cotangent=tree.map(function, inputs.cotangent),
        batch=inputs.batch.map(function),
        total=function(inputs.total),
    )


def _storages(structured: Any) -> set[UntypedStorage]:
    return {leaf.untyped_storage() for leaf in tensors_of(structured)}
