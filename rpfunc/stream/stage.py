"""Stages: a run of consecutive layers on one microbatch, as pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.model import Flat, Layer, Params
from rpfunc.objectives.objective import Objective
from rpfunc.stream.head import head_vjp
from rpfunc.stream.linearize import Pullback, forward, linearize

Grads = Mapping[str, Flat]
"""By layer name, the sum of that layer's gradients so far; a layer without an entry has had none."""


def stage_forward(layers: Sequence[Layer], params: Params, x: Any, batch: Batch, chunk: int | None) -> Iterator[Any]:
    """Yields each layer's output in turn; the last is the stage's. The caller keeps what it needs."""
    for layer in layers:
        x = forward(layer, params, x, batch, chunk)
        yield x


def stage_linearize(
    layers: Sequence[Layer], params: Params, x: Any, batch: Batch, chunk: int | None, *, with_output: bool = True
) -> tuple[Any, list[Pullback]]:
    """Returns the stage's output (None unless `with_output`) and the pullback of each layer."""
    pullbacks = []
    for index, layer in enumerate(layers):
        needed = with_output or index + 1 < len(layers)
        x, pullback = linearize(layer, params, x, batch, chunk, with_output=needed)
        pullbacks.append(pullback)
    return x, pullbacks


def stage_backward(
    layers: Sequence[Layer], pullbacks: list[Pullback], cotangent: Flat, grads: Grads
) -> tuple[Flat, Grads]:
    """Returns (dx, grads with these layers' contributions added); empties `pullbacks`, donates `grads`' tensors."""
    updated = dict(grads)
    for layer in reversed(layers):
        # popped, so that a layer's residuals are freed before the next layer's gradients exist
        cotangent, updated[layer.name] = pullbacks.pop()(cotangent, updated.get(layer.name))
    return cotangent, updated


def stage_fused(
    layers: Sequence[Layer],
    objective: Objective,
    params: Params,
    x: Any,
    batch: Batch,
    total: Tensor,
    chunk: int | None,
    grads: Grads,
) -> tuple[Tensor, Flat, Grads]:
    """Returns (F, dx, grads with contributions) of the model's last layers: forward, loss and backward in one."""
    *body, head = layers
    x, pullbacks = stage_linearize(body, params, x, batch, chunk)
    loss, cotangent, head_grads = head_vjp(head, objective, params, x, batch, total, chunk, grads.get(head.name))
    del x
    dx, updated = stage_backward(body, pullbacks, cotangent, grads)
    return loss, dx, {**updated, head.name: head_grads}
