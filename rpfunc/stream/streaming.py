"""How rows are worked on: a matter of memory and time alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rpfunc.model import Flat
from rpfunc.sums import Sums

Order = Literal["layer", "chunk"]

Grads = Mapping[str, Sums]
"""By layer name, the sum of that layer's gradients so far; a layer without an entry has had none."""

StagePullback = Callable[[Flat, Grads], tuple[Flat, Grads]]
"""(cotangent, grads) -> (dx, grads with a run of layers' contributions); may be called once, donates both."""


@dataclass(frozen=True)
class Streaming:
    """Chunk sizes, order, and what is kept.

    chunk       rows of a layer at a time; None: whole rows, residuals kept
    head_chunk  rows of the head, and so of logits, at a time; None: as `chunk`
    order       "layer": one layer over all chunks, then the next (stores each layer's input)
                "chunk": one chunk through all layers of a stage (stores what rows leave for later ones)
    keep_attention  share of the rows, 0 to 1, the last ones, whose results of attention each layer keeps for its
                backward pass (order "layer" with a chunk): that share of an activation for each layer of a stage. Later
                rows see more and cost more: half of the rows spare three quarters of the second attention
    """

    chunk: int | None = None
    head_chunk: int | None = None
    order: Order = "layer"
    keep_attention: float = 0.0

    @property
    def head_rows(self) -> int | None:
        """Rows of the head at a time."""
        return self.chunk if self.head_chunk is None else self.head_chunk

    def problems(self, microbatches: Any = 1) -> list[str]:
        """Returns, in words, what cannot work, of the number of microbatches too."""
        sizes = {"chunk": self.chunk, "head_chunk": self.head_chunk}
        problems = [
            f"{name} is {size!r}, it must be at least 1 row (or None for whole rows)"
            for name, size in sizes.items()
            if size is not None and (not isinstance(size, int) or size < 1)
        ]
        if self.order not in ("layer", "chunk"):
            problems.append(f"order is {self.order!r}, it must be 'layer' or 'chunk'")
        if self.order == "chunk" and self.chunk is None:
            problems.append("order is 'chunk', which needs a chunk, for example chunk=512")
        if not isinstance(self.keep_attention, int | float) or not 0 <= self.keep_attention <= 1:
            problems.append(f"keep_attention is {self.keep_attention!r}, it must be a share of the rows, 0 to 1")
        elif self.keep_attention and (self.chunk is None or self.order == "chunk"):
            problems.append("keep_attention is for layers that are recomputed: it needs a chunk and order='layer'")
        if not isinstance(microbatches, int) or microbatches < 1:
            problems.append(f"microbatches is {microbatches!r}, it must be at least 1")
        return problems


def dtype_problems(compute_dtype: Any) -> list[str]:
    """Returns why layers cannot compute in that dtype."""
    if compute_dtype is None or getattr(compute_dtype, "is_floating_point", False):
        return []
    return [f"compute_dtype is {compute_dtype!r}, needs a floating-point dtype or None"]
