"""Attending layers: an output row depends on the same input row and on keys and values of other rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rpfunc.batch import Batch
from rpfunc.model import Flat
from rpfunc.stream.flat import accumulate, overwrite, own, rows, spans, vjp, write


def attending(
    kv: Callable[[Any, Any, Batch], Any], rows: Callable[[Any, Any, Any, Batch], Any], *, causal: bool = True
) -> Attending:
    """Returns the attending form of `kv(params, x, batch)` and `rows(params, x, kv, batch) -> y`."""
    return Attending(kv, rows, causal)


@dataclass(frozen=True)
class Attending:
    """The form of `rows(params, x, kv, batch) -> y` over `kv(params, x, batch)`, which is row-wise.

    `kv` gives any pytree of leaves (B, T, ...): keys, values, whatever a row shows to others. `rows` computes output
    rows from their own input rows and the kv that they may see. Causal: kv of rows 0 to the chunk's last, so the
    chunk is the *last* `x.shape[1]` of them (bottom-right alignment; see `attend`). Bidirectional: kv of all rows.
    """

    kv: Callable[[Any, Any, Batch], Any]
    rows: Callable[[Any, Any, Any, Batch], Any]
    causal: bool = True

    def full(self, params: Any, x: Any, batch: Batch) -> Any:
        """Returns the output for whole rows."""
        return self.rows(params, x, self.kv(params, x, batch), batch)

    def forward(self, params: Any, x: Any, batch: Batch, chunk: int) -> Any:
        """Returns the output, computed `chunk` rows at a time."""
        kv, output = self._all_kv(params, x, batch, chunk), None
        for start, stop in spans(batch.num_rows, chunk):
            seen = rows(kv, 0, stop) if self.causal else kv
            part = self.rows(params, rows(x, start, stop), seen, batch.rows(start, stop))
            output = write(output, part, start, stop, batch.num_rows)
        return output

    def backward(
        self, params: Any, x: Any, batch: Batch, chunk: int, cotangent: Flat, grads: Flat | None
    ) -> tuple[Flat, Flat]:
        """Returns (dx, grads + dparams); `cotangent` and `grads` are donated.

        Chunks go from last to first. A row's kv is read by that row and later ones only, so once a chunk is done, the
        cotangents of its own kv are complete and flow on at once, through the vjp of `kv` on those rows. Keys and
        values are computed once a layer, and one chunk's residuals exist at a time. Bidirectional layers know the
        cotangents of kv only after every chunk. Cost: one forward and one vjp of each chunk.
        Source: own, after StreamBP (arXiv 2506.03077).
        """
        kv, pieces = self._all_kv(params, x, batch, chunk), spans(batch.num_rows, chunk)
        dx: Flat | None = None
        dkv: Flat | None = None
        for start, stop in reversed(pieces):
            piece, x_rows, dy = batch.rows(start, stop), rows(x, start, stop), rows(cotangent, start, stop)
            seen = rows(kv, 0, stop) if self.causal else kv
            _, pull = vjp(lambda params, x, kv, piece=piece: self.rows(params, x, kv, piece), params, x_rows, seen)
            dparams, dx_rows, dseen = pull(dy)
            grads = accumulate(grads, dparams, foreign=cotangent + dx_rows + dseen)
            if dkv is None:
                dkv = own(dseen, foreign=cotangent + dx_rows)
            else:
                for place, part in zip(dkv, dseen, strict=True):
                    place[:, : part.shape[1]].add_(part)
            if self.causal:
                dx_through_kv, grads = self._kv_vjp(params, x_rows, piece, rows(dkv, start, stop), grads)
                dx_rows = _sum(dx_rows, dx_through_kv)
            dx = overwrite(dx, cotangent, dx_rows, start, stop)
        if not self.causal:
            for start, stop in pieces:
                dx_rows, grads = self._kv_vjp(
                    params, rows(x, start, stop), batch.rows(start, stop), rows(dkv, start, stop), grads
                )
                for place, addend in zip(dx or (), dx_rows, strict=True):
                    place[:, start:stop].add_(addend)
        return dx or (), grads or ()

    def _all_kv(self, params: Any, x: Any, batch: Batch, chunk: int) -> Any:
        kv: Any = None
        for start, stop in spans(batch.num_rows, chunk):
            part = self.kv(params, rows(x, start, stop), batch.rows(start, stop))
            kv = write(kv, part, start, stop, batch.num_rows)
        return kv

    def _kv_vjp(self, params: Any, x: Any, piece: Batch, dkv: Flat, grads: Flat | None) -> tuple[Flat, Flat]:
        _, pull = vjp(lambda params, x: self.kv(params, x, piece), params, x)
        dparams, dx = pull(dkv)
        return dx, accumulate(grads, dparams, foreign=dkv + dx)


def _sum(left: Flat, right: Flat) -> Flat:
    return tuple(a + b for a, b in zip(left, right, strict=True))
