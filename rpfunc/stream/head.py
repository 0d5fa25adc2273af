"""The last layer joined to the objective's score: logits exist for one chunk of rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.model import Flat, Layer, Params
from rpfunc.objectives.objective import Objective
from rpfunc.stream.flat import accumulate, own, rows, spans, vjp, write
from rpfunc.stream.rowwise import RowWise


def head_value(layer: Layer, objective: Objective, params: Params, x: Any, batch: Batch, chunk: int | None) -> Tensor:
    """Returns Σ over rows of s, (B, ...) float64, without gradients."""
    sums: Tensor | None = None
    for _, x_rows, piece in _pieces(layer, x, batch, chunk):
        sums = _add(sums, objective.score(layer.form.full(layer.select(params), x_rows, piece), piece))
    assert sums is not None
    return sums


def head_vjp(
    layer: Layer,
    objective: Objective,
    params: Params,
    x: Any,
    batch: Batch,
    total: Tensor,
    chunk: int | None,
    grads: Flat | None,
) -> tuple[Tensor, Flat, Flat]:
    """Returns (F, dx, grads + dparams) for one microbatch; `grads` is donated.

    F's derivative by the sums is the cotangent of every row's score. A linear F has the same derivative everywhere, so
    one pass over the chunks serves; any other F takes a first pass to find the sums. Cost: one vjp of each chunk.
    """
    if objective.linear:
        cotangent = None
    else:
        cotangent = _sums_cotangent(objective, head_value(layer, objective, params, x, batch, chunk), batch, total)
    selected, pieces = layer.select(params), _pieces(layer, x, batch, chunk)
    sums: Tensor | None = None
    dx: Flat | None = None
    for span, x_rows, piece in pieces:

        def score(params: Any, x: Any, piece: Batch = piece) -> Tensor:
            return objective.score(layer.form.full(params, x, piece), piece)

        scores, pull = vjp(score, selected, x_rows)
        if cotangent is None:
            cotangent = _sums_cotangent(objective, torch.zeros_like(scores[:, 0], dtype=torch.float64), batch, total)
        dparams, dx_rows = pull((cotangent.to(scores.dtype).unsqueeze(1).expand_as(scores),))
        sums = _add(sums, scores)
        grads = accumulate(grads, dparams, foreign=dx_rows)
        dx = own(dx_rows) if len(pieces) == 1 else write(dx, dx_rows, *span, batch.num_rows)
    assert sums is not None
    return objective.loss(sums, batch, total), dx or (), grads or ()


def _sums_cotangent(objective: Objective, sums: Tensor, batch: Batch, total: Tensor) -> Tensor:
    _, pull = vjp(lambda sums: objective.loss(sums, batch, total), sums)
    ((cotangent,),) = pull((torch.ones((), dtype=torch.float64, device=sums.device),))
    return cotangent


def _pieces(layer: Layer, x: Any, batch: Batch, chunk: int | None) -> list[tuple[tuple[int, int], Any, Batch]]:
    """Returns (rows covered, x of those rows, batch of those rows) for each chunk; all in one where none is asked for.

    A head that is not row-wise stays whole, and needs no row dimension at all.
    """
    if chunk is None or not isinstance(layer.form, RowWise):
        return [((0, 0), x, batch)]
    covered = spans(batch.num_rows, chunk)
    return [((start, stop), rows(x, start, stop), batch.rows(start, stop)) for start, stop in covered]


def _add(sums: Tensor | None, scores: Tensor) -> Tensor:
    # float64, so that a sum over a long row loses nothing to its length
    part = scores.detach().double().sum(dim=1)
    return part if sums is None else sums + part
