"""How much memory a run will take, found by running it without computing anything."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.errors import OptionsError, PlanError
from rpfunc.model import Model, Params
from rpfunc.objectives.objective import Objective
from rpfunc.stream.chunk_major import check_stepping
from rpfunc.stream.freeze import freeze
from rpfunc.stream.stage import stage_fused
from rpfunc.stream.streaming import Order, Streaming


def memory(
    model: Model,
    objective: Objective,
    params: Params,
    batch: Batch,
    *,
    microbatches: int = 1,
    chunk: int | None = None,
    head_chunk: int | None = None,
    order: Order = "layer",
    keep_attention: int = 0,
    frozen: tree.Mask | None = None,
) -> int:
    """Returns the predicted peak of live tensor bytes of `value_and_grad` in the caller's thread, gradients included.

    The same quantity as `rpfunc.memory.peak` measures: what is live above parameters and batch. The run's own code is
    executed on tensors that have shapes and no data, and their lifetimes are followed; what a kernel uses inside
    itself is not seen. Takes about 0.1 ms for each tensor operation, and no memory, whatever the sizes.
    Raises OptionsError or PlanError for options that cannot work. Source: own.
    """
    how = Streaming(chunk, head_chunk, order, keep_attention)
    if how.problems():
        raise OptionsError.listing("options", how.problems())
    if how.order == "chunk":
        check_stepping(model.layers)
    prepared = objective.prepare(batch)
    total = objective.total(prepared)
    pieces = prepared.microbatches(microbatches)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:

        def shape_only(leaf: Any) -> Any:
            return fake.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        params = tree.map(shape_only, dict(params))
        pieces, total = [piece.map(shape_only) for piece in pieces], fake.from_tensor(total)
        if objective.statistic is not None:
            statistic = torch.zeros((), dtype=torch.float64)  # its value does not matter
            pieces = [replace(piece, constant={**piece.constant, "statistic": statistic}) for piece in pieces]
        if frozen is not None:
            model, params = freeze(model, params, frozen)
        with _LiveBytes() as live, torch.no_grad():
            grads: Any = {}
            for piece in pieces:
                _, _, grads = stage_fused(model.layers, objective, params, (), piece, total, how, grads)
            peak_bytes: int = live.peak_bytes
            return peak_bytes


def max_sequence(
    peak_bytes: Callable[[int], int], budget_bytes: int, *, granularity: int = 128, largest: int = 1 << 24
) -> int:
    """Returns the largest number of rows, a multiple of `granularity`, whose predicted peak is within the budget.

    `peak_bytes` maps a number of rows to a predicted peak that grows with it, such as `memory` of a batch of so many
    rows. It is asked a handful of times: a peak grows nearly linearly, so each answer points to the next question.
    Raises PlanError, with the peak of the shortest sequence, if that is beyond the budget already.
    """
    low, low_bytes = granularity, peak_bytes(granularity)
    if low_bytes > budget_bytes:
        raise PlanError(f"{low} rows take {low_bytes} bytes, beyond the budget of {budget_bytes}; no sequence fits")
    high, high_bytes = None, 0
    while high is None or high - low > granularity:
        if high is None:
            guess = min(2 * low, largest)
            if guess == low:
                return low
        else:
            slope = (high_bytes - low_bytes) / (high - low)
            guess = low + int((budget_bytes - low_bytes) / slope) if slope > 0 else (low + high) // 2
            # away from both ends by a part of the gap, so that it closes from both sides
            guess = min(max(guess, low + (high - low) // 8), high - (high - low) // 8)
            guess = min(max(guess // granularity * granularity, low + granularity), high - granularity)
        guess_bytes = peak_bytes(guess)
        if guess_bytes <= budget_bytes:
            low, low_bytes = guess, guess_bytes
        else:
            high, high_bytes = guess, guess_bytes
    return low


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages that operations make: how many bytes are live now, and were at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(storage) for storage in map(_storage, tree.leaves((args, kwargs or {}))) if storage is not None}
        result = function(*args, **(kwargs or {}))
        for storage in map(_storage, tree.leaves(result)):
            if storage is not None and id(storage) not in known and storage not in self._storages:
                self._storages.add(storage)
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self._release, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _release(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


def _storage(leaf: Any) -> Any:
    return leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
