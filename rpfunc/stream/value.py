"""The loss without gradients: evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.model import Model, Params
from rpfunc.objectives.objective import Objective
from rpfunc.stream.head import head_value
from rpfunc.stream.stage import stage_forward


def value(
    model: Model, objective: Objective, *, microbatches: int = 1, chunk: int | None = None
) -> Callable[[Params, Batch], tuple[Tensor, Tensor]]:
    """Returns fn(params, batch) -> (loss, total), both () float64: the objective's loss over the whole batch.

    One microbatch at a time, `chunk` rows at a time, in the caller's thread; no layer's input outlives the next
    layer. Equals `value_and_grad`'s loss on the same microbatches and chunk.
    """

    def function(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        model.check(params)
        prepared = objective.prepare(batch)
        total = objective.total(prepared)
        *body, head = model.layers
        losses = []
        with torch.no_grad():
            for piece in prepared.microbatches(microbatches):
                x: Any = ()
                for output in stage_forward(body, params, (), piece, chunk):
                    x = output
                sums = head_value(head, objective, params, x, piece, chunk)
                losses.append(objective.loss(sums, piece, total))
        return torch.stack(losses).sum(), total

    return function
