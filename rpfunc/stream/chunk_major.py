"""Stages a chunk at a time: one chunk of rows goes through all layers of the stage before the next one starts.

What earlier rows leave (keys and values, states) is kept for every layer; no layer's input is stored, except the
stage's own. Sources: SeCO (arXiv 2505.16710) and OOMB (arXiv 2602.02108) for the order; the rest is own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.errors import PlanError
from rpfunc.model import Flat, Layer, Params
from rpfunc.objectives.objective import Objective
from rpfunc.stream.calls import Calling
from rpfunc.stream.flat import check_rows, contiguous, floating, overwrite, own, rows, spans, write
from rpfunc.stream.form import Stepping
from rpfunc.stream.head import derivative_of, head_value, head_vjp
from rpfunc.stream.memory import Memory
from rpfunc.stream.rowwise import RowWise
from rpfunc.stream.streaming import Grads, Streaming
from rpfunc.sums import Sums, whole_sums


def can_step(layers: Sequence[Layer]) -> bool:
    """Returns whether the last layers of a model can work a chunk at a time, in order."""
    return all(isinstance(layer.form, Stepping) for layer in layers) and isinstance(layers[-1].form, RowWise)


def looking_ahead(layers: Sequence[Layer]) -> list[str]:
    """Returns, in words, every layer whose rows may depend on later rows."""
    return [
        f"layer {layer.name!r} is {type(layer.form).__name__.lower()}, its rows may depend on later rows"
        for layer in layers
        if not isinstance(layer.form, Stepping)
    ]


def check_stepping(layers: Sequence[Layer]) -> None:
    """Raises PlanError naming every layer of a model that cannot work a chunk at a time, in order."""
    problems = looking_ahead(layers)
    if isinstance(layers[-1].form, Stepping) and not isinstance(layers[-1].form, RowWise):
        problems.append(f"the last layer {layers[-1].name!r} is {type(layers[-1].form).__name__.lower()}, not row-wise")
    if problems:
        raise PlanError.listing(
            'order "chunk" needs row-wise, causal or recurrent layers (order "layer" takes any)', problems
        )


def chunk_forward(
    layers: Sequence[Layer], params: Params, x: Any, batch: Batch, how: Streaming, keep: Collection[int]
) -> dict[int, Any]:
    """Returns the inputs of those layers that are in `keep`, by index; len(layers) stands for the stage's output."""
    stage = _Stage(layers, params, batch, how)
    kept: dict[int, Any] = {}
    for start, stop in stage.pieces:
        value = rows(x, start, stop)
        for index in range(len(layers)):
            value = stage.step(index, value, start, stop)
            if index + 1 in keep:
                kept[index + 1] = write(kept.get(index + 1), value, start, stop, batch.num_rows)
    return kept


def chunk_backward(
    layers: Sequence[Layer], params: Params, x: Any, batch: Batch, how: Streaming, cotangent: Flat, grads: Grads
) -> tuple[Flat, Grads]:
    """Returns (dx, grads with contributions) of a stage, recomputed from its input; donates `cotangent` and `grads`.

    A pass over all chunks but the last finds what they leave; then chunks are recomputed and differentiated from last
    to first. Cost: as layer by layer.
    """
    stage, updated, cotangent = _Stage(layers, params, batch, how), dict(grads), own(cotangent)
    stage.fill(x)
    dx: Flat | None = None
    for start, stop in reversed(stage.pieces):
        _, pullbacks = stage.linearize(rows(x, start, stop), start, stop)
        dx_rows = stage.transpose(pullbacks, rows(cotangent, start, stop), updated)
        dx = overwrite(dx, cotangent, dx_rows, start, stop, batch.num_rows)
        del dx_rows
    return dx or (), updated


def chunk_fused(
    layers: Sequence[Layer],
    objective: Objective,
    params: Params,
    x: Any,
    batch: Batch,
    total: Tensor,
    how: Streaming,
    grads: Grads,
    *,
    donate: bool = False,
) -> tuple[Tensor, Flat, Grads]:
    """Returns (F, dx, grads with contributions) of the model's last layers; donates `grads`, and `x` if told to.

    The loss of a chunk is differentiated as soon as the chunk has come to the head, so that no cotangent of the
    stage's width is stored either. A non-linear F needs all sums first: the head joins the first pass.
    """
    *body, head = layers
    stage, updated = _Stage(body, params, batch, how), dict(grads)

    def sums() -> Tensor:
        parts = []
        for start, stop in stage.pieces:
            value = rows(x, start, stop)
            for index in range(len(body)):
                value = stage.step(index, value, start, stop)
            parts.append(head_value(head, objective, params, value, batch.rows(start, stop), how))
        return sum(parts[1:], start=parts[0])

    if objective.linear:
        stage.fill(x)
    derivative = derivative_of(objective, batch, total, sums)
    sum_of_scores: Tensor | None = None
    # a chunk's rows of x have been read when those of dx are written; an x of one chunk may be somebody else's
    dx = floating(x)[0] if donate and len(stage.pieces) > 1 else None
    for start, stop in reversed(stage.pieces):
        value, pullbacks = stage.linearize(rows(x, start, stop), start, stop)
        part, dy, updated[head.name] = head_vjp(
            head, objective, params, value, batch.rows(start, stop), how, derivative, updated.get(head.name)
        )
        del value
        sum_of_scores = part if sum_of_scores is None else sum_of_scores + part
        dx = write(dx, own(stage.transpose(pullbacks, dy, updated)), start, stop, batch.num_rows)
        del dy  # or it would live beside the next chunk's residuals
    assert sum_of_scores is not None
    return objective.loss(sum_of_scores, batch, total), dx or (), updated


class _Stage:
    """The layers of one stage on one microbatch, and what its chunks have left so far."""

    def __init__(self, layers: Sequence[Layer], params: Params, batch: Batch, how: Streaming) -> None:
        assert how.chunk is not None  # Streaming's own rule
        self.layers, self.batch = layers, batch
        self.pieces = spans(batch.num_rows, how.chunk)
        self.selected = [layer.select(params) for layer in layers]
        self.forms = [layer.form for layer in layers if isinstance(layer.form, Stepping)]
        self.memories: list[Memory] = [form.memory() for form in self.forms]

    def step(self, index: int, x: Any, start: int, stop: int) -> Any:
        """Returns a layer's output of one chunk, keeping what the chunk leaves."""
        form, memory, piece = self.forms[index], self.memories[index], self.batch.rows(start, stop)
        selected = self.selected[index]
        with Calling(self.layers[index], "forward", selected, x, piece):
            output = form.advance(selected, x, piece, memory, start, stop, self.batch.num_rows)
            check_rows(output, stop - start)
        return contiguous(output)

    def fill(self, x: Any) -> None:
        """Runs every chunk that later ones read, up to what the last layer leaves."""
        for start, stop in self.pieces[:-1]:
            value = rows(x, start, stop)
            for index in range(len(self.layers) - 1):
                value = self.step(index, value, start, stop)
            if self.layers:
                past, piece = self.memories[-1].past(start), self.batch.rows(start, stop)
                with Calling(self.layers[-1], "forward", self.selected[-1], value, piece):
                    left = self.forms[-1].leave(self.selected[-1], value, past, piece)
                self.memories[-1].keep(left, start, stop, self.batch.num_rows)

    def linearize(self, x: Any, start: int, stop: int) -> tuple[Any, list[Any]]:
        """Returns the stage's output of one chunk and the pullback of each layer."""
        pullbacks, piece = [], self.batch.rows(start, stop)
        x = contiguous(x)
        for layer, form, selected, memory in zip(self.layers, self.forms, self.selected, self.memories, strict=True):
            with Calling(layer, "forward", selected, x, piece):
                x, pullback = form.linearize_step(selected, x, piece, memory, start, stop)
                check_rows(x, stop - start)
            x = contiguous(x)
            pullbacks.append(pullback)
        return x, pullbacks

    def transpose(self, pullbacks: list[Any], cotangent: Flat, grads: dict[str, Sums]) -> Flat:
        """Returns dx of one chunk; adds to `grads`, empties `pullbacks`."""
        for layer, selected in zip(reversed(self.layers), reversed(self.selected), strict=True):
            with Calling(layer, "backward"):
                dx, added = pullbacks.pop()(cotangent, grads.get(layer.name))
            # rows looked up would add up to what this order spares: a tensor as long as the sequence
            grads[layer.name] = whole_sums(added, floating(selected)[0])
            cotangent = contiguous(dx)
        return cotangent
