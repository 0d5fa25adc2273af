"""How much memory a run will take, found by running it without computing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.checks import count_problems, rate_problems, size_problems
from rpfunc.errors import ModelError, OptionsError, PlanError
from rpfunc.meter import Following, Meter
from rpfunc.model import Model, Params
from rpfunc.objectives.checked import checked
from rpfunc.objectives.objective import Objective
from rpfunc.stream.bidirectional import Bidirectional
from rpfunc.stream.chunk_major import check_stepping
from rpfunc.stream.flat import FewChunks, requiring
from rpfunc.stream.freeze import freeze
from rpfunc.stream.recurrent import Recurrent
from rpfunc.stream.stage import stage_fused, whole_grads
from rpfunc.stream.streaming import Order, Streaming
from rpfunc.stream.value import with_statistic


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
    keep_attention: float = 0.0,
    frozen: tree.Mask | None = None,
) -> int:
    """Returns the predicted peak of live tensor bytes of `value_and_grad` with these options and no other, gradients
    included: in the caller's thread, with one stage.

    The same quantity as `rpfunc.memory.peak` measures, within 10%: what is live above parameters and batch (some per
    cent too little where all tensors are tiny). The run's own code is executed on tensors that have shapes and no data,
    and their lifetimes are followed; what a kernel uses inside itself is not seen. Of many chunks the last two are run,
    of many microbatches the first two, which take most: so it takes some seconds, however long the sequence, and no
    memory. (Where a layer is recurrent or bidirectional, of which each chunk adds to what is held, all are run.)
    Raises ModelError, BatchError, TreeError, OptionsError or PlanError for what `value_and_grad` would refuse, and
    ModelError for a layer in which shapes depend on numbers. Source: own.
    """
    how = Streaming(chunk, head_chunk, order, keep_attention)
    problems = how.problems(microbatches)
    if problems:
        raise OptionsError.listing("options", problems)
    if how.order == "chunk":
        check_stepping(model.layers)
    model.check(params)
    objective = checked(objective)
    prepared = objective.prepare(batch)
    total = objective.total(prepared)
    # the second microbatch is the largest of those that find gradients to add to
    pieces = prepared.microbatches(microbatches)[:2]
    how = on_few_chunks(model, how)
    with without_data() as fake:

        def shape_only(leaf: Any) -> Any:
            return fake.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        params = tree.map(shape_only, dict(params))
        pieces, total = [piece.map(shape_only) for piece in pieces], fake.from_tensor(total)
        if frozen is not None:
            model, params = freeze(model, params, frozen)
        params = requiring(params)
        meter = Meter()
        with Following(meter), torch.no_grad():
            pieces = with_statistic(model, objective, params, pieces, how)
            grads: Any = {}
            for piece in pieces:
                grads = whole_grads(model.layers, params, grads)
                _, _, grads = stage_fused(model.layers, objective, params, (), piece, total, how, grads)
            by_layer = [[grads.pop(layer.name)] for layer in model.layers]
            summed = {name: model.sum_grad(name, by_layer, params) for name in params}
            del summed
            return meter.peak_bytes


@contextmanager
def without_data() -> Iterator[FakeTensorMode]:
    """Runs the block's operations on tensors that have shapes and no data.

    Raises ModelError where an operation needs the data to know a shape, or reads a number.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            yield fake
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = "".join(f" ({each.removeprefix('rpfunc: ')})" for each in getattr(error, "__notes__", ())[:1])
        raise ModelError(
            f"memory: {error.func} gives what depends on numbers, not on shapes alone{where}, so what a run takes "
            "cannot be known before it; operations such as torch.where would do, or a run without a memory limit"
        ) from error


def on_few_chunks(model: Model, how: Streaming) -> Streaming:
    """Returns the same way to stream on a few chunks, where nothing adds up over all of them."""
    if any(isinstance(layer.form, Recurrent | Bidirectional) for layer in model.layers):
        return how
    return replace(
        how,
        chunk=None if how.chunk is None else FewChunks(how.chunk),
        head_chunk=None if how.head_chunk is None else FewChunks(how.head_chunk),
    )


def max_sequence(
    peak_bytes: Callable[[int], int], budget_bytes: int, *, granularity: int = 128, largest: int = 1 << 24
) -> int:
    """Returns the largest number of rows, a multiple of `granularity`, whose predicted peak is within the budget.

    `peak_bytes` maps a number of rows to a predicted peak that grows with it, such as `memory` of a batch of so many
    rows. It is asked a handful of times: a peak grows nearly linearly, so each answer points to the next question.
    Nothing longer than `largest` is asked for. Raises PlanError for numbers that cannot work, and, with the peak of the
    shortest sequence, if that is beyond the budget already.
    """
    problems = count_problems({"granularity": granularity, "largest": largest})
    problems += rate_problems({"budget_bytes": budget_bytes})
    if not problems and largest < granularity:
        problems.append(f"largest is {largest}, it must be at least the granularity, {granularity}")
    if problems:
        raise PlanError.listing("max_sequence", problems)

    def peak(num: int) -> int:
        found = peak_bytes(num * granularity)
        if problems := size_problems({f"the answer of peak_bytes({num * granularity})": found}):
            raise PlanError.listing("max_sequence", problems)
        return found

    most = largest // granularity  # from here on in units of it
    low, low_bytes = 1, peak(1)
    if low_bytes > budget_bytes:
        raise PlanError(
            f"{granularity} rows take {low_bytes} bytes, beyond the budget of {budget_bytes}; no sequence fits"
        )
    before, before_bytes, high, high_bytes = 0, 0, most + 1, 0
    fitted, in_a_row = True, 0  # answers on one side in a row, after which the next question goes further
    while high - low > 1:
        other, other_bytes = (high, high_bytes) if high_bytes else (before, before_bytes)
        slope = (other_bytes - low_bytes) / (other - low) if other else 0.0
        guess = low + int(min((budget_bytes - low_bytes) / slope, most)) if slope > 0 else 2 * low
        guess = max(guess, low + (1 << in_a_row)) if fitted else min(guess, high - (1 << in_a_row))
        # a peak bends upwards, so that a guess beyond all answers goes too far
        guess = min(max(guess, low + 1), high - 1, 8 * low)
        guess_bytes = peak(guess)
        in_a_row = in_a_row + 1 if fitted == (guess_bytes <= budget_bytes) else 0
        fitted = guess_bytes <= budget_bytes
        if fitted:
            before, before_bytes, low, low_bytes = low, low_bytes, guess, guess_bytes
        else:
            high, high_bytes = guess, guess_bytes
    return low * granularity
