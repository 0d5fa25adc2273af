"""Opaque layers: nothing is known of how rows depend on rows, so the layer always works on whole rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rpfunc.batch import Batch
from rpfunc.model import Flat
from rpfunc.stream.accumulate import vjp_into
from rpfunc.sums import Sums


def opaque(function: Callable[[Any, Any, Batch], Any]) -> Opaque:
    """Returns the opaque form of `function(params, x, batch) -> y`."""
    return Opaque(function)


@dataclass(frozen=True)
class Opaque:
    """The form of any `function(params, x, batch) -> y`; x needs no row dimension. A chunk size changes nothing."""

    function: Callable[[Any, Any, Batch], Any]

    def full(self, params: Any, x: Any, batch: Batch) -> Any:
        """Returns the output."""
        return self.function(params, x, batch)

    def forward(self, params: Any, x: Any, batch: Batch, chunk: int) -> Any:
        """Returns the output, in one piece."""
        del chunk
        return self.function(params, x, batch)

    def backward(
        self, params: Any, x: Any, batch: Batch, chunk: int, cotangent: Flat, grads: Sums | None
    ) -> tuple[Flat, Sums]:
        """Returns (dx, grads + dparams), in one piece, recomputing the forward."""
        del chunk
        _, pull = vjp_into(lambda params, x: self.function(params, x, batch), params, x)
        grads, (dx,) = pull(cotangent, grads)
        return dx, grads

    def precompose(self, function: Callable[[Any], Any]) -> Opaque:
        """Returns the form that applies `function` to its parameters first."""
        return Opaque(lambda params, x, batch: self.function(function(params), x, batch))
