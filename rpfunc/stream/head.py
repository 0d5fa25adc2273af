"""The last layer joined to the objective's score: logits exist for one chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.model import Flat, Layer, Params
from rpfunc.objectives.objective import Objective
from rpfunc.stream.accumulate import vjp_into
from rpfunc.stream.flat import own, rows, spans, vjp, write
from rpfunc.stream.rowwise import RowWise

Derivative = Callable[[Tensor], Tensor]
"""From row scores (B, n, ...) to F's derivative by their sums (B, ...), which is every row's cotangent."""


def head_value(layer: Layer, objective: Objective, params: Params, x: Any, batch: Batch, chunk: int | None) -> Tensor:
    """Returns Σ over rows of s, (B, ...) float64, without gradients."""
    sums: Tensor | None = None
    for _, x_rows, piece in _pieces(layer, x, batch, chunk):
        part = _sum(objective.score(layer.form.full(layer.select(params), x_rows, piece), piece))
        sums = part if sums is None else sums + part
    assert sums is not None  # a batch has rows
    return sums


def head_vjp(
    layer: Layer,
    objective: Objective,
    params: Params,
    x: Any,
    batch: Batch,
    chunk: int | None,
    derivative: Derivative,
    grads: Flat | None,
) -> tuple[Tensor, Flat, Flat]:
    """Returns (Σ over rows of s, dx, grads + dparams) of one microbatch or a run of its rows; `grads` is donated.

    Cost: one vjp of each chunk, and no recomputation: the cotangents are known before.
    """
    selected, pieces = layer.select(params), _pieces(layer, x, batch, chunk)
    sums: Tensor | None = None
    dx: Flat | None = None
    for span, x_rows, piece in pieces:

        def score(params: Any, x: Any, piece: Batch = piece) -> Tensor:
            return objective.score(layer.form.full(params, x, piece), piece)

        scores, pull = vjp_into(score, selected, x_rows)
        # shared with later chunks: whatever comes to lie in its memory is copied
        cotangent = derivative(scores).to(scores.dtype).unsqueeze(1).expand_as(scores)
        grads, (dx_rows,) = pull((cotangent,), grads)
        sums = _sum(scores) if sums is None else sums + _sum(scores)
        dx = own(dx_rows, foreign=(cotangent,)) if len(pieces) == 1 else write(dx, dx_rows, *span, batch.num_rows)
        # not held while the next chunk's are computed: each is as large as the head
        del scores, pull, cotangent
    assert sums is not None
    return sums, dx or (), grads or ()


def derivative_of(objective: Objective, batch: Batch, total: Tensor, sums: Callable[[], Tensor]) -> Derivative:
    """Returns F's derivative for one microbatch.

    A linear F has the same derivative everywhere, so it needs no sums and one pass over the rows serves. Any other F
    is differentiated at its sums, which `sums()` finds by a pass of its own.
    """
    if objective.linear:
        return lambda scores: _gradient(objective, batch, total, torch.zeros_like(scores[:, 0], dtype=torch.float64))
    derivative = _gradient(objective, batch, total, sums())
    return lambda scores: derivative


def _gradient(objective: Objective, batch: Batch, total: Tensor, sums: Tensor) -> Tensor:
    _, pull = vjp(lambda sums: objective.loss(sums, batch, total), sums)
    ((gradient,),) = pull((torch.ones((), dtype=torch.float64, device=sums.device),))
    return gradient


def _pieces(layer: Layer, x: Any, batch: Batch, chunk: int | None) -> list[tuple[tuple[int, int], Any, Batch]]:
    """Returns (rows covered, x of those rows, batch of those rows) for each chunk; all in one where none is asked for.

    A head that is not row-wise stays whole, and needs no row dimension at all.
    """
    if chunk is None or not isinstance(layer.form, RowWise):
        return [((0, 0), x, batch)]
    covered = spans(batch.num_rows, chunk)
    return [((start, stop), rows(x, start, stop), batch.rows(start, stop)) for start, stop in covered]


def _sum(scores: Tensor) -> Tensor:
    # float64, so that a sum over a long row loses nothing to its length
    return scores.detach().double().sum(dim=1)
