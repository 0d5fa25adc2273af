"""How rows are worked on: a matter of memory and time alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from rpfunc.checks import count_problems, is_count, is_real, is_word, plain_number, shown
from rpfunc.model import Flat
from rpfunc.sums import Sums

Order = Literal["layer", "chunk"]

COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that arithmetic exists for; others, float8 for example, are for storage alone."""

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

    def __post_init__(self) -> None:
        for name in ("chunk", "head_chunk", "keep_attention"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))

    @property
    def head_rows(self) -> int | None:
        """Rows of the head at a time."""
        return self.chunk if self.head_chunk is None else self.head_chunk

    def problems(self, microbatches: Any = 1) -> list[str]:
        """Returns, in words, what cannot work, of the number of microbatches too."""
        sizes = {"chunk": self.chunk, "head_chunk": self.head_chunk}
        problems = [
            f"{name} is {shown(size)}, it must be at least 1 row (or None for whole rows)"
            for name, size in sizes.items()
            if size is not None and (not is_count(size) or size < 1)
        ]
        if not is_word(self.order, get_args(Order)):
            problems.append(f"order is {shown(self.order)}, it must be 'layer' or 'chunk'")
        elif self.order == "chunk" and self.chunk is None:
            problems.append("order is 'chunk', which needs a chunk, for example chunk=512")
        share = self.keep_attention
        if not is_real(share) or isinstance(share, bool) or not 0 <= share <= 1:
            problems.append(f"keep_attention is {shown(share)}, it must be a share of the rows, 0 to 1")
        elif share and (self.chunk is None or is_word(self.order, ["chunk"])):
            problems.append("keep_attention is for layers that are recomputed: it needs a chunk and order='layer'")
        return problems + count_problems({"microbatches": microbatches})


def dtype_problems(compute_dtype: Any) -> list[str]:
    """Returns why layers cannot compute in that dtype."""
    if compute_dtype is None or (isinstance(compute_dtype, torch.dtype) and compute_dtype in COMPUTE_DTYPES):
        return []
    needed = ", ".join(map(str, COMPUTE_DTYPES))
    return [f"compute_dtype is {shown(compute_dtype)}, needs a floating-point dtype or None: {needed}"]
