"""Stages: a run of consecutive layers on one microbatch, as pure functions, in either order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.model import Flat, Layer, Params
from rpfunc.objectives.objective import Objective
from rpfunc.stream.chunk_major import chunk_backward, chunk_forward, chunk_fused
from rpfunc.stream.flat import floating
from rpfunc.stream.layer_major import layer_backward, layer_forward, layer_fused
from rpfunc.stream.streaming import Grads, Streaming
from rpfunc.sums import whole_sums


def stage_forward(
    layers: Sequence[Layer], params: Params, x: Any, batch: Batch, how: Streaming, keep: Collection[int]
) -> dict[int, Any]:
    """Returns the inputs of those layers that are in `keep`, by index; len(layers) stands for the stage's output."""
    if how.order == "chunk":
        return chunk_forward(layers, params, x, batch, how, keep)
    return layer_forward(layers, params, x, batch, how.chunk, keep)


def stage_backward(
    layers: Sequence[Layer], params: Params, x: Any, batch: Batch, how: Streaming, cotangent: Flat, grads: Grads
) -> tuple[Flat, Grads]:
    """Returns (dx, grads with contributions) of a stage, recomputed from its input; donates cotangent and grads."""
    if how.order == "chunk":
        return chunk_backward(layers, params, x, batch, how, cotangent, grads)
    return layer_backward(layers, params, x, batch, how, cotangent, grads)


def stage_fused(
    layers: Sequence[Layer],
    objective: Objective,
    params: Params,
    x: Any,
    batch: Batch,
    total: Tensor,
    how: Streaming,
    grads: Grads,
) -> tuple[Tensor, Flat, Grads]:
    """Returns (F, dx, grads with contributions) of the last layers: forward, loss and backward; donates grads."""
    fused = chunk_fused if how.order == "chunk" else layer_fused
    return fused(layers, objective, params, x, batch, total, how, grads)


def whole_grads(layers: Sequence[Layer], params: Params, grads: Grads) -> Grads:
    """Returns `grads`, donated, as whole tensors: rows that were looked up are kept of one microbatch alone.

    So kept rows take no more than a layer's input, however many microbatches there are.
    """
    return {
        layer.name: whole_sums(grads[layer.name], floating(layer.select(params))[0])
        for layer in layers
        if layer.name in grads
    }
