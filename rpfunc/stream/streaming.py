"""How rows are worked on: a matter of memory and time alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rpfunc.model import Flat

Order = Literal["layer", "chunk"]

Grads = Mapping[str, Flat]
"""By layer name, the sum of that layer's gradients so far; a layer without an entry has had none."""


@dataclass(frozen=True)
class Streaming:
    """Chunk sizes and order.

    chunk       rows of a layer at a time; None: whole rows, residuals kept
    head_chunk  rows of the head, and so of logits, at a time; None: as `chunk`
    order       "layer": one layer over all chunks, then the next (stores each layer's input)
                "chunk": one chunk through all layers of a stage (stores what rows leave for later ones)
    """

    chunk: int | None = None
    head_chunk: int | None = None
    order: Order = "layer"

    @property
    def head_rows(self) -> int | None:
        """Rows of the head at a time."""
        return self.chunk if self.head_chunk is None else self.head_chunk

    def problems(self) -> list[str]:
        """Returns, in words, what cannot work."""
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
        return problems
