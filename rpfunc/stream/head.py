"""The last layer joined to the objective's score: logits exist for one chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.errors import ModelError
from rpfunc.model import Flat, Layer, Params
from rpfunc.objectives.objective import Objective
from rpfunc.stream.accumulate import vjp_into
from rpfunc.stream.calls import Calling
from rpfunc.stream.few_rows import FewRowsProducts, few_rows_linear
from rpfunc.stream.flat import contiguous, even_spans, own, rows, spans, vjp, write
from rpfunc.stream.rowwise import RowWise
from rpfunc.stream.streaming import Streaming
from rpfunc.sums import Sums

Derivative = Callable[[Tensor], Tensor]
"""From row scores (B, n, ...) to F's derivative by their sums (B, ...), which is every row's cotangent."""


def head_value(layer: Layer, objective: Objective, params: Params, x: Any, batch: Batch, how: Streaming) -> Tensor:
    """Returns Σ over rows of s, (B, ...) float64, without gradients."""
    selected = layer.select(params)

    def output(x: Any, rows: Batch) -> Any:
        with Calling(layer, "forward", selected, x, rows):
            return layer.form.full(selected, x, rows)

    sums: Tensor | None = None
    for chunk in _pieces(layer, batch, how):
        of_chunk: Tensor | None = None
        for span in chunk:
            x_rows, piece = _cut(x, batch, span)
            with FewRowsProducts():
                scores = _score(objective, output(x_rows, piece), piece, cut=span is not None)
            of_chunk = _add(of_chunk, _sum(scores))
            del scores
        sums = _add(sums, of_chunk)
    assert sums is not None
    return sums


def head_vjp(
    layer: Layer,
    objective: Objective,
    params: Params,
    x: Any,
    batch: Batch,
    how: Streaming,
    derivative: Derivative,
    grads: Sums | None,
) -> tuple[Tensor, Flat, Sums]:
    """Returns (Σ over rows of s, dx, grads + dparams) of one microbatch or a run of its rows; `grads` is donated.

    Cost: one vjp of each run of rows, and no recomputation: the cotangents are known before.
    """
    selected = layer.select(params)
    sums: Tensor | None = None
    dx: Flat | None = None
    for chunk in _pieces(layer, batch, how):
        of_chunk: Tensor | None = None
        for span in chunk:
            (x_rows, piece), cut = _cut(x, batch, span), span is not None

            def score(params: Any, x: Any, given: Any = x_rows, piece: Batch = piece, cut: bool = cut) -> Tensor:
                with Calling(layer, "forward", selected, given, piece):
                    output = layer.form.full(params, x, piece)
                return _score(objective, output, piece, cut=cut)

            with FewRowsProducts():  # of frozen weights; others are known to `vjp_into`
                scores, pull = vjp_into(score, selected, x_rows, linear=few_rows_linear)
            # shared with other rows: whatever comes to lie in its memory is copied
            cotangent = derivative(scores).to(scores.dtype).unsqueeze(1).expand_as(scores)
            with Calling(layer, "backward"):
                grads, (dx_rows,) = pull((cotangent,), grads)
            of_chunk = _add(of_chunk, _sum(scores))
            if span is None:
                dx = own(dx_rows, foreign=(cotangent,))
            else:
                dx = write(dx, dx_rows, span[0], span[1], batch.num_rows)
            # not held while the next rows' are computed: each is as large as the head
            del scores, pull, cotangent, dx_rows, x_rows, piece, score
        sums = _add(sums, of_chunk)
    assert sums is not None
    return sums, contiguous(dx or ()), grads or ()


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


def _pieces(layer: Layer, batch: Batch, how: Streaming) -> list[list[tuple[int, int] | None]]:
    """Returns the runs of rows that the head takes at a time, chunk by chunk; None, once, for all rows and no cut.

    The rows of a layer's chunk are cut by themselves, and chunks come from last to first: so it is where the head goes
    on with a chunk that the layer before has just finished, and no plan changes the order of a sum. A head that is not
    row-wise stays whole, and needs no row dimension at all.
    """
    if how.head_rows is None or not isinstance(layer.form, RowWise):
        return [[None]]
    num_rows = batch.num_rows
    return [
        [(start + low, start + high) for low, high in even_spans(stop - start, how.head_rows)]
        for start, stop in reversed(spans(num_rows, how.chunk or num_rows))
    ]


def _cut(x: Any, batch: Batch, span: tuple[int, int] | None) -> tuple[Any, Batch]:
    return (x, batch) if span is None else (rows(x, *span), batch.rows(*span))


def _score(objective: Objective, output: Any, piece: Batch, *, cut: bool) -> Tensor:
    """Returns the score. Raises ModelError if it has not a row for each row, where rows are `cut`."""
    scores = objective.score(output, piece)
    if cut and scores.shape[1] != piece.num_rows:
        raise ModelError(
            f"objective {objective.name!r}: its `score` returned {scores.shape[1]} rows for {piece.num_rows}; where "
            "rows are cut (chunk, head_chunk), it must return one for each row (labels are shifted in `prepare`, on "
            "whole rows)"
        )
    return scores


def _sum(scores: Tensor) -> Tensor:
    # float64, so that a sum over a long row loses nothing to its length
    return scores.detach().double().sum(dim=1)


def _add(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    return part if total is None or part is None else total + part
