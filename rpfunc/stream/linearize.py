"""One layer's output together with its pullback: with residuals kept, or streamed and recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpfunc.batch import Batch
from rpfunc.model import Flat, Layer, Params
from rpfunc.stream.accumulate import vjp_into
from rpfunc.stream.attending import Attending
from rpfunc.stream.calls import Calling
from rpfunc.stream.flat import contiguous, own
from rpfunc.stream.kept_attention import KeptAttention
from rpfunc.stream.streaming import Grads, StagePullback


def forward(layer: Layer, params: Params, x: Any, batch: Batch, chunk: int | None) -> Any:
    """Returns the layer's output, `chunk` rows at a time (None: all at once)."""
    selected = layer.select(params)
    with Calling(layer, "forward", selected, x, batch):
        output = layer.form.full(selected, x, batch) if chunk is None else layer.form.forward(selected, x, batch, chunk)
    return contiguous(output)


def linearize(
    layer: Layer,
    params: Params,
    x: Any,
    batch: Batch,
    chunk: int | None,
    *,
    with_output: bool = True,
    keep_attention: float = 0.0,
    recall: Callable[[], Any] | None = None,
) -> tuple[Any, StagePullback]:
    """Returns (output, pullback) of a layer.

    Without a chunk the pullback holds the layer's residuals. With one it holds the layer's input, or `recall`, which
    finds it again, and recomputes chunk by chunk; the output then costs a forward of its own, which `with_output=False`
    saves (None is returned), and of which `keep_attention` keeps attention's results for that share of the rows.
    """
    selected = layer.select(params)
    if chunk is None:
        with Calling(layer, "forward", selected, x, batch):
            output, pull = vjp_into(lambda params, x: layer.form.full(params, x, batch), selected, x)

        def whole(cotangent: Flat, grads: Grads) -> tuple[Flat, Grads]:
            with Calling(layer, "backward"):
                added, (dx,) = pull(cotangent, grads.get(layer.name))
            return contiguous(dx), {**grads, layer.name: added}

        return contiguous(output), whole

    keeps = keep_attention and with_output and isinstance(layer.form, Attending)
    kept = (KeptAttention(keep_attention),) if keeps else ()
    output = None
    if with_output:
        with Calling(layer, "forward", selected, x, batch):
            output = contiguous(layer.form.forward(selected, x, batch, chunk, *kept))
    find: Callable[[], Any] = (lambda: x) if recall is None else recall

    def streamed(cotangent: Flat, grads: Grads) -> tuple[Flat, Grads]:
        x = find()
        with Calling(layer, "backward", selected, x, batch):
            dx, added = layer.form.backward(selected, x, batch, chunk, own(cotangent), grads.get(layer.name), *kept)
        return contiguous(dx), {**grads, layer.name: added}

    return output, streamed
