"""Forms: how a layer's output rows depend on its input rows, and so how it can be taken apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self

import torch

from rpfunc.batch import Batch
from rpfunc.model import Flat
from rpfunc.stream.accumulate import vjp_into
from rpfunc.stream.flat import check_rows, floating, overwrite, own, rows, spans, write
from rpfunc.stream.kept_attention import KeptAttention
from rpfunc.stream.memory import Memory, StateMemory
from rpfunc.sums import Sums

Pullback = Callable[[Flat, Sums | None], tuple[Flat, Sums]]
"""(cotangent, grads) -> (dx, grads + dparams); may be called once; `grads` is donated."""


class Stepping(ABC):
    """A form whose output rows depend on the same input rows and on what earlier rows left.

    It works chunk by chunk: what a chunk does, leaves and gets back is all that differs between row-wise, attending and
    recurrent layers. This class runs one layer over all chunks; `rpfunc.stream.chunk_major` runs one chunk through many
    layers.
    """

    @abstractmethod
    def full(self, params: Any, x: Any, batch: Batch) -> Any:
        """Returns the layer's output for whole rows."""

    @abstractmethod
    def leave(self, params: Any, x: Any, past: Any, batch: Batch) -> Any:
        """Returns what a chunk leaves for later ones, without its output rows where they are not needed for it; `past`
        is what earlier ones left, None for the first.
        """

    @abstractmethod
    def memory(self) -> Memory:
        """Returns an empty memory of what chunks leave."""

    @abstractmethod
    def advance(self, params: Any, x: Any, batch: Batch, memory: Any, start: int, stop: int, num_rows: int) -> Any:
        """Returns the output rows start to stop of `num_rows`, and keeps what they leave."""

    @abstractmethod
    def linearize_step(
        self, params: Any, x: Any, batch: Batch, memory: Any, start: int, stop: int
    ) -> tuple[Any, Pullback]:
        """Returns (output rows, pullback) of the chunk of rows start to stop; later chunks come through it first."""

    @abstractmethod
    def precompose(self, function: Callable[[Any], Any]) -> Self:
        """Returns the form that applies `function` to its parameters first."""

    def forward(self, params: Any, x: Any, batch: Batch, chunk: int, kept: KeptAttention | None = None) -> Any:
        """Returns the output for whole rows, computed `chunk` rows at a time; attention's results go into `kept`."""
        memory, output, num_rows = self.memory(), None, batch.num_rows
        for start, stop in spans(num_rows, int(chunk) if kept else chunk):  # each chunk adds to `kept`
            with kept.computing(start, num_rows) if kept else nullcontext():
                part = self.advance(
                    params, rows(x, start, stop), batch.rows(start, stop), memory, start, stop, num_rows
                )
            output = write(output, part, start, stop, num_rows)
            del part  # or it would live beside the next chunk's
        return output

    def backward(
        self,
        params: Any,
        x: Any,
        batch: Batch,
        chunk: int,
        cotangent: Flat,
        grads: Sums | None,
        kept: KeptAttention | None = None,
    ) -> tuple[Flat, Sums]:
        """Returns (dx, grads + dparams), `chunk` rows at a time; donates `cotangent`, `grads` and what `forward` kept.

        First every chunk leaves what later ones read (keys and values: once for each row). Then chunks are
        differentiated from last to first. What a row left is read by itself and later rows only, so its cotangent is
        complete when its chunk's turn comes, and goes through that chunk's vector-Jacobian product together with the
        output's. One chunk's residuals exist at a time. Cost: one `leave` and one vjp of `step` for each chunk.
        Source: own, after StreamBP (arXiv 2506.03077).
        """
        pieces, num_rows = spans(batch.num_rows, chunk), batch.num_rows
        memory = self.memory()
        for start, stop in pieces[:-1]:
            left = self.leave(params, rows(x, start, stop), memory.past(start), batch.rows(start, stop))
            memory.keep(left, start, stop, num_rows)
        dx: Flat | None = None
        for start, stop in reversed(pieces):
            with kept.recomputing(start) if kept else nullcontext():
                output, pullback = self.linearize_step(
                    params, rows(x, start, stop), batch.rows(start, stop), memory, start, stop
                )
            check_rows(output, stop - start)
            del output
            dx_rows, grads = pullback(rows(cotangent, start, stop), grads)
            dx = overwrite(dx, cotangent, dx_rows, start, stop, num_rows)
            del pullback, dx_rows  # or these residuals would live beside the next chunk's
        return dx or (), grads or ()


class Scanning(Stepping):
    """A scan over chunks: each hands one value, a carry, to the next, and `step` says all."""

    @abstractmethod
    def step(self, params: Any, x: Any, past: Any, batch: Batch) -> tuple[Any, Any]:
        """Returns (output rows, what they leave for the next chunk); `past` is None for the first."""

    def memory(self) -> StateMemory:
        """Returns an empty memory of what is handed on."""
        return StateMemory()

    def advance(
        self, params: Any, x: Any, batch: Batch, memory: StateMemory, start: int, stop: int, num_rows: int
    ) -> Any:
        """Returns the output rows start to stop of `num_rows`, and keeps what they leave."""
        output, left = self.step(params, x, memory.past(start), batch)
        memory.keep(left, start, stop, num_rows)
        return output

    def linearize_step(
        self, params: Any, x: Any, batch: Batch, memory: StateMemory, start: int, stop: int
    ) -> tuple[Any, Pullback]:
        """Returns (output rows, pullback) of the chunk of rows start to stop; later chunks come through it first."""

        def step(params: Any, x: Any, past: Any) -> tuple[Any, Any]:
            return self.step(params, x, past, batch)

        (output, left), pull = vjp_into(step, params, x, memory.past(start))
        left_leaves = floating(left)[0]

        def pullback(cotangent: Flat, grads: Sums | None) -> tuple[Flat, Sums]:
            dleft = memory.cotangent(stop)
            if dleft is None:
                dleft = tuple(torch.zeros_like(leaf) for leaf in left_leaves)
            grads, (dx, dpast) = pull(cotangent + dleft, grads)
            memory.receive(own(dpast, foreign=cotangent + dleft + dx + grads), start)
            return dx, grads

        return output, pullback
