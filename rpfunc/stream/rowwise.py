"""Row-wise layers: each output row depends on the same input row alone (norms, MLPs, embeddings, heads)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rpfunc.batch import Batch
from rpfunc.stream.form import Scanning


def rowwise(function: Callable[[Any, Any, Batch], Any]) -> RowWise:
    """Returns the form of `function(params, x, batch) -> y`, where row t of y depends on row t of x and batch."""
    return RowWise(function)


@dataclass(frozen=True)
class RowWise(Scanning):
    """See `rowwise`. A row leaves nothing for others."""

    function: Callable[[Any, Any, Batch], Any]

    def full(self, params: Any, x: Any, batch: Batch) -> Any:
        """Returns the output for whole rows."""
        return self.function(params, x, batch)

    def step(self, params: Any, x: Any, past: Any, batch: Batch) -> tuple[Any, Any]:
        """Returns (output rows, None)."""
        del past
        return self.function(params, x, batch), None

    def leave(self, params: Any, x: Any, past: Any, batch: Batch) -> Any:
        """Returns None."""
        del params, x, past, batch

    def precompose(self, function: Callable[[Any], Any]) -> RowWise:
        """Returns the form that applies `function` to its parameters first."""
        return RowWise(lambda params, x, batch: self.function(function(params), x, batch))
