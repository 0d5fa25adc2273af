"""Row-wise layers: each output row depends on the same input row alone (norms, MLPs, embeddings, heads)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rpfunc.batch import Batch
from rpfunc.model import Flat
from rpfunc.stream.flat import accumulate, overwrite, rows, spans, vjp, write


def rowwise(function: Callable[[Any, Any, Batch], Any]) -> RowWise:
    """Returns the row-wise form of `function(params, x, batch) -> y`."""
    return RowWise(function)


@dataclass(frozen=True)
class RowWise:
    """The form of `function(params, x, batch) -> y`, where row t of y (B, T, ...) depends on row t of x and batch."""

    function: Callable[[Any, Any, Batch], Any]

    def full(self, params: Any, x: Any, batch: Batch) -> Any:
        """Returns the output for whole rows."""
        return self.function(params, x, batch)

    def forward(self, params: Any, x: Any, batch: Batch, chunk: int) -> Any:
        """Returns the output, computed `chunk` rows at a time."""
        output: Any = None
        for start, stop in spans(batch.num_rows, chunk):
            part = self.function(params, rows(x, start, stop), batch.rows(start, stop))
            output = write(output, part, start, stop, batch.num_rows)
        return output

    def backward(
        self, params: Any, x: Any, batch: Batch, chunk: int, cotangent: Flat, grads: Flat | None
    ) -> tuple[Flat, Flat]:
        """Returns (dx, grads + dparams): the sum over chunks of each chunk's vector-Jacobian product.

        Source: StreamBP (arXiv 2506.03077), linear decomposition. `cotangent` and `grads` are donated.
        """
        dx: Flat | None = None
        for start, stop in spans(batch.num_rows, chunk):
            piece = batch.rows(start, stop)
            _, pull = vjp(lambda params, x, piece=piece: self.function(params, x, piece), params, rows(x, start, stop))
            dparams, dx_rows = pull(rows(cotangent, start, stop))
            grads = accumulate(grads, dparams, foreign=cotangent + dx_rows)
            dx = overwrite(dx, cotangent, dx_rows, start, stop)
        return dx or (), grads or ()
