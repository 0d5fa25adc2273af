"""One layer's output together with its pullback: with residuals kept, or streamed and recomputed."""

from __future__ import annotations

from typing import Any

from rpfunc.batch import Batch
from rpfunc.model import Flat, Layer, Params
from rpfunc.stream.accumulate import vjp_into
from rpfunc.stream.flat import own
from rpfunc.stream.form import Pullback


def forward(layer: Layer, params: Params, x: Any, batch: Batch, chunk: int | None) -> Any:
    """Returns the layer's output, `chunk` rows at a time (None: all at once)."""
    selected = layer.select(params)
    return layer.form.full(selected, x, batch) if chunk is None else layer.form.forward(selected, x, batch, chunk)


def linearize(
    layer: Layer, params: Params, x: Any, batch: Batch, chunk: int | None, *, with_output: bool = True
) -> tuple[Any, Pullback]:
    """Returns (output, pullback) of a layer.

    Without a chunk the pullback holds the layer's residuals. With one it holds the layer's input, and recomputes
    chunk by chunk; the output then costs a forward of its own, which `with_output=False` saves (None is returned).
    """
    selected = layer.select(params)
    if chunk is None:
        output, pull = vjp_into(lambda params, x: layer.form.full(params, x, batch), selected, x)

        def kept(cotangent: Flat, grads: Flat | None) -> tuple[Flat, Flat]:
            grads, (dx,) = pull(cotangent, grads)
            return dx, grads

        return output, kept

    def streamed(cotangent: Flat, grads: Flat | None) -> tuple[Flat, Flat]:
        return layer.form.backward(selected, x, batch, chunk, own(cotangent), grads)

    return (layer.form.forward(selected, x, batch, chunk) if with_output else None), streamed
