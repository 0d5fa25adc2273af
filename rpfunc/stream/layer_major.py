"""Stages a layer at a time: one layer over all its chunks, then the next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.model import Flat, Layer, Params
from rpfunc.objectives.objective import Objective
from rpfunc.stream.chunk_major import can_step, chunk_fused
from rpfunc.stream.form import Stepping
from rpfunc.stream.head import derivative_of, head_value, head_vjp
from rpfunc.stream.linearize import forward, linearize
from rpfunc.stream.rowwise import RowWise
from rpfunc.stream.streaming import Grads, StagePullback, Streaming


def layer_forward(
    layers: Sequence[Layer], params: Params, x: Any, batch: Batch, chunk: int | None, keep: Collection[int]
) -> dict[int, Any]:
    """Returns the inputs of those layers that are in `keep`, by index; len(layers) stands for the stage's output."""
    kept = {}
    for index, layer in enumerate(layers, start=1):
        x = forward(layer, params, x, batch, chunk)
        if index in keep:
            kept[index] = x
    return kept


def layer_linearize(
    layers: Sequence[Layer], params: Params, x: Any, batch: Batch, how: Streaming, *, with_output: bool = True
) -> tuple[Any, list[StagePullback]]:
    """Returns the stage's output (None unless `with_output`) and the pullbacks of its layers, one after another.

    The output of a row-wise layer that has no input, an embedding, is not stored: looked up once more, it costs little.
    """
    pullbacks: list[StagePullback] = []
    embeds = x == () and len(layers) > 1 and isinstance(layers[0].form, RowWise) and how.chunk is not None
    for index, layer in enumerate(layers):
        needed = with_output or index + 1 < len(layers)
        recall = partial(forward, layers[0], params, (), batch, how.chunk) if embeds and index == 1 else None
        x, pullback = linearize(
            layer,
            params,
            x,
            batch,
            how.chunk,
            with_output=needed,
            keep_attention=how.keep_attention,
            recall=recall,
        )
        pullbacks.append(pullback)
    return x, pullbacks


def layer_transpose(pullbacks: list[StagePullback], cotangent: Flat, grads: Grads) -> tuple[Flat, Grads]:
    """Returns (dx, grads with these layers' contributions added); empties `pullbacks`, donates `grads`' tensors."""
    while pullbacks:
        # popped, so that a layer's residuals are freed before the next layer's gradients exist
        cotangent, grads = pullbacks.pop()(cotangent, grads)
    return cotangent, grads


def layer_backward(
    layers: Sequence[Layer], params: Params, x: Any, batch: Batch, how: Streaming, cotangent: Flat, grads: Grads
) -> tuple[Flat, Grads]:
    """Returns (dx, grads with contributions) of a stage, recomputed from its input."""
    _, pullbacks = layer_linearize(layers, params, x, batch, how, with_output=False)
    del x
    return layer_transpose(pullbacks, cotangent, grads)


def layer_fused(
    layers: Sequence[Layer],
    objective: Objective,
    params: Params,
    x: Any,
    batch: Batch,
    total: Tensor,
    how: Streaming,
    grads: Grads,
) -> tuple[Tensor, Flat, Grads]:
    """Returns (F, dx, grads with contributions) of the model's last layers: forward, loss and backward in one.

    Where F is linear and nothing looks ahead, the layer before the head joins it and goes chunk by chunk, last chunk
    first: its output and that output's cotangent never exist whole, and its forward is not computed twice.
    """
    if how.chunk is not None and objective.linear and len(layers) > 1 and can_step(layers[-2:]):
        hidden, pullbacks = layer_linearize(layers[:-2], params, x, batch, how)
        # rows that were written chunk by chunk lie in memory made here; an opaque layer may hand on anybody's
        donate = len(layers) > 2 and isinstance(layers[-3].form, Stepping)
        loss, cotangent, updated = chunk_fused(
            layers[-2:], objective, params, hidden, batch, total, how, grads, donate=donate
        )
        del hidden
        dx, updated = layer_transpose(pullbacks, cotangent, updated)
        return loss, dx, updated
    *body, head = layers
    hidden, pullbacks = layer_linearize(body, params, x, batch, how)
    derivative = derivative_of(
        objective, batch, total, partial(head_value, head, objective, params, hidden, batch, how)
    )
    sums, cotangent, head_grads = head_vjp(
        head, objective, params, hidden, batch, how, derivative, grads.get(head.name)
    )
    del hidden
    dx, updated = layer_transpose(pullbacks, cotangent, grads)
    return objective.loss(sums, batch, total), dx, {**updated, head.name: head_grads}
