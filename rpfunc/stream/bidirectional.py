"""Bidirectional attending layers: an output row depends on the same input row and on keys and values of all rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rpfunc.batch import Batch
from rpfunc.model import Flat, accumulator_dtype
from rpfunc.stream.accumulate import vjp_into
from rpfunc.stream.flat import floating, overwrite, rows, spans, write
from rpfunc.stream.writes import reading
from rpfunc.sums import Sums


@dataclass(frozen=True)
class Bidirectional:
    """See `attending`, not causal."""

    kv: Callable[[Any, Any, Batch], Any]
    rows: Callable[[Any, Any, Any, Batch], Any]

    def full(self, params: Any, x: Any, batch: Batch) -> Any:
        """Returns the output for whole rows."""
        return self._see(params, x, self.kv(params, x, batch), batch)

    def forward(self, params: Any, x: Any, batch: Batch, chunk: int) -> Any:
        """Returns the output, computed `chunk` rows at a time."""
        kv, output = self._all_kv(params, x, batch, chunk), None
        for start, stop in spans(batch.num_rows, chunk):
            part = self._see(params, rows(x, start, stop), kv, batch.rows(start, stop))
            output = write(output, part, start, stop, batch.num_rows)
            del part
        return output

    def backward(
        self, params: Any, x: Any, batch: Batch, chunk: int, cotangent: Flat, grads: Sums | None
    ) -> tuple[Flat, Sums]:
        """Returns (dx, grads + dparams); `cotangent` and `grads` are donated.

        The cotangents of kv are complete only after every chunk of rows, and go through kv's own vjp in a second pass.
        """
        kv, pieces = self._all_kv(params, x, batch, chunk), spans(batch.num_rows, chunk)
        dkv = tuple(torch.zeros_like(leaf, dtype=accumulator_dtype(leaf.dtype)) for leaf in floating(kv)[0])
        dx: Flat | None = None
        for start, stop in pieces:
            piece, dy = batch.rows(start, stop), rows(cotangent, start, stop)
            _, pull = vjp_into(
                lambda params, x, kv, piece=piece: self._see(params, x, kv, piece), params, rows(x, start, stop), kv
            )
            grads, (dx_rows, dseen) = pull(dy, grads)
            for place, part in zip(dkv, dseen, strict=True):
                place.add_(part)
            dx = overwrite(dx, cotangent, dx_rows, start, stop, batch.num_rows)
            del pull, dy, dseen, dx_rows  # or these would live beside the next chunk's
        for start, stop in pieces:
            piece = batch.rows(start, stop)
            left, pull = vjp_into(
                lambda params, x, piece=piece: self.kv(params, x, piece), params, rows(x, start, stop)
            )
            kinds = floating(left)[0]
            dleft = tuple(leaf[:, start:stop].to(kind.dtype) for leaf, kind in zip(dkv, kinds, strict=True))
            grads, (dx_rows,) = pull(dleft, grads)
            for place, part in zip(dx or (), dx_rows, strict=True):
                place[:, start:stop].add_(part)
            del left, pull, kinds, dleft, dx_rows
        return dx or (), grads or ()

    def precompose(self, function: Callable[[Any], Any]) -> Bidirectional:
        """Returns the form that applies `function` to its parameters first."""
        return Bidirectional(
            lambda params, x, batch: self.kv(function(params), x, batch),
            lambda params, x, kv, batch: self.rows(function(params), x, kv, batch),
        )

    def _see(self, params: Any, x: Any, kv: Any, batch: Batch) -> Any:
        return reading("kv", kv, self.rows, params, x, kv, batch)

    def _all_kv(self, params: Any, x: Any, batch: Batch, chunk: int) -> Any:
        kv: Any = None
        for start, stop in spans(batch.num_rows, chunk):
            part = self.kv(params, rows(x, start, stop), batch.rows(start, stop))
            kv = write(kv, part, start, stop, batch.num_rows)
            del part
        return kv
