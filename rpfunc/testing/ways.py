"""The ways to cut a layer's work, each as a forward and a backward, and plain autograd to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.model import Flat, Form, Layer
from rpfunc.stream import Attending, Stepping
from rpfunc.stream.chunk_major import chunk_backward, chunk_forward
from rpfunc.stream.flat import is_inexact
from rpfunc.stream.kept_attention import KeptAttention
from rpfunc.stream.linearize import linearize
from rpfunc.stream.streaming import Streaming
from rpfunc.sums import Sums


class Cut(NamedTuple):
    """Rows at a time, and pieces of the batch."""

    chunk: int
    num_microbatches: int

    def microbatches(self, x: Any, batch: Batch) -> list[tuple[slice, Any, Batch]]:
        """Returns (examples covered, x of those, batch of those) for each piece."""
        if self.num_microbatches == 1:
            return [(slice(None), x, batch)]
        pieces = []
        for piece in batch.microbatches(self.num_microbatches):
            start = piece.first_example - batch.first_example
            covered = slice(start, start + piece.num_examples)
            pieces.append((covered, tree.map(lambda leaf, covered=covered: leaf[covered], x), piece))
        return pieces


class Way(NamedTuple):
    """One of the ways to run a layer."""

    name: str
    forward: Callable[[Any, Any, Batch], Any]
    backward: Callable[[Any, Any, Batch, Flat, Sums | None], tuple[Flat, Sums]]


def ways(form: Form, chunk: int) -> Iterator[Way]:
    """Yields the ways that `form` has: in one piece, layer-major, with attention kept, chunk-major."""
    layers = (Layer("layer", form, "layer"),)
    how = Streaming(chunk, order="chunk")

    def whole_backward(params: Any, x: Any, batch: Batch, dy: Flat, grads: Sums | None) -> tuple[Flat, Sums]:
        _, pullback = linearize(layers[0], {"layer": params}, x, batch, None)
        dx, after = pullback(dy, {} if grads is None else {"layer": grads})
        return dx, after["layer"]

    def chunk_major(params: Any, x: Any, batch: Batch, dy: Flat, grads: Sums | None) -> tuple[Flat, Sums]:
        before = {} if grads is None else {"layer": grads}
        dx, after = chunk_backward(layers, {"layer": params}, x, batch, how, dy, before)
        return dx, after["layer"]

    yield Way("whole rows", form.full, whole_backward)
    yield Way(
        f"layer by layer, {chunk} rows at a time",
        lambda params, x, batch: form.forward(params, x, batch, chunk),
        lambda params, x, batch, dy, grads: form.backward(params, x, batch, chunk, dy, grads),
    )
    if isinstance(form, Attending):

        def kept(params: Any, x: Any, batch: Batch, dy: Flat, grads: Sums | None) -> tuple[Flat, Sums]:
            _, pullback = linearize(layers[0], {"layer": params}, x, batch, chunk, keep_attention=1.0)
            dx, after = pullback(dy, {} if grads is None else {"layer": grads})
            return dx, after["layer"]

        yield Way(
            f"layer by layer, {chunk} rows at a time, attention kept",
            lambda params, x, batch: form.forward(params, x, batch, chunk, KeptAttention(1.0)),
            kept,
        )
    if isinstance(form, Stepping):
        yield Way(
            f"chunk by chunk, {chunk} rows at a time",
            lambda params, x, batch: chunk_forward(layers, {"layer": params}, x, batch, how, keep=[1])[1],
            chunk_major,
        )


def prefix(x: Any, batch: Batch, num_examples: int, num_rows: int | None) -> tuple[Any, Batch]:
    """Returns the first examples and of them the first rows (None: all, which need not be rows)."""
    x, batch = tree.map(lambda leaf: leaf[:num_examples], x), batch.examples(0, num_examples)
    if num_rows is None:
        return x, batch
    return tree.map(lambda leaf: leaf[:, :num_rows], x), batch.rows(0, num_rows)


def autograd(form: Form, params: Any, x: Any, batch: Batch, seed: int) -> tuple[Any, list[Tensor], list[Tensor], Any]:
    """Returns form.full's output, the gradients of x and params by torch.autograd, and the cotangent drawn."""
    detached = [
        tree.map(lambda leaf: leaf.detach().clone().requires_grad_(is_inexact(leaf)), each) for each in (x, params)
    ]
    output = form.full(detached[1], detached[0], batch)
    generator = torch.Generator().manual_seed(seed)
    cotangent = [torch.randint(-2, 3, leaf.shape, generator=generator).to(leaf.dtype) for leaf in floats(output)]
    reached = [(leaf, dy) for leaf, dy in zip(floats(output), cotangent, strict=True) if leaf.requires_grad]
    inputs, weights = (floats(each) for each in detached)
    if not reached or not inputs + weights:
        grads: Any = [torch.zeros_like(leaf) for leaf in inputs + weights]
    else:
        outputs, dys = zip(*reached, strict=True)
        grads = torch.autograd.grad(outputs, inputs + weights, dys, allow_unused=True, materialize_grads=True)
    output = tree.map(lambda leaf: leaf.detach(), output)
    return output, list(grads[: len(inputs)]), list(grads[len(inputs) :]), cotangent


def floats(structured: Any) -> list[Tensor]:
    """Returns the leaves that have a gradient."""
    return [leaf for leaf in tree.leaves(structured) if is_inexact(leaf)]
