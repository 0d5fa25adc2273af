"""The loss without gradients: evaluation, and what an objective has to know of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.errors import OptionsError
from rpfunc.model import Model, Params
from rpfunc.objectives.checked import checked
from rpfunc.objectives.objective import Objective
from rpfunc.stream.chunk_major import check_stepping
from rpfunc.stream.flat import requiring
from rpfunc.stream.freeze import cast
from rpfunc.stream.head import head_value
from rpfunc.stream.stage import stage_forward
from rpfunc.stream.streaming import Order, Streaming, dtype_problems


def value(
    model: Model,
    objective: Objective,
    *,
    microbatches: int = 1,
    chunk: int | None = None,
    head_chunk: int | None = None,
    order: Order = "layer",
    compute_dtype: torch.dtype | None = None,
) -> Callable[[Params, Batch], tuple[Tensor, Tensor]]:
    """Returns fn(params, batch) -> (loss, total), both () float64: the objective's loss over the whole batch.

    One microbatch at a time, `chunk` rows at a time, in the caller's thread; no layer's input outlives the next
    layer. Equals `value_and_grad`'s loss on the same microbatches, chunks and compute_dtype, to which a layer's
    parameters are cast while it runs.
    """
    how = Streaming(chunk, head_chunk, order)
    problems = how.problems(microbatches) + dtype_problems(compute_dtype)
    if problems:
        raise OptionsError.listing("options", problems)
    if how.order == "chunk":
        check_stepping(model.layers)
    scored = checked(objective)

    def function(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        model.check(params)
        params = AsTasksRead(params, compute_dtype)
        prepared = scored.prepare(batch)
        total = scored.total(prepared)
        pieces = with_statistic(model, scored, params, prepared.microbatches(microbatches), how)
        sums = _sums(model, scored, params, pieces, how)
        losses = [scored.loss(part, piece, total) for part, piece in zip(sums, pieces, strict=True)]
        return torch.stack(losses).sum(), total

    return function


def with_statistic(
    model: Model, objective: Objective, params: Params, pieces: Sequence[Batch], how: Streaming
) -> list[Batch]:
    """Returns the microbatches, with the objective's statistic of them all among their constants if it needs one.

    Costs a forward pass over all of them then, and nothing otherwise.
    """
    if objective.statistic is None:
        return list(pieces)
    parts = zip(_sums(model, objective, params, pieces, how), pieces, strict=True)
    statistic = torch.stack([objective.statistic(sums, piece) for sums, piece in parts]).sum(dim=0)
    return [replace(piece, constant={**piece.constant, "statistic": statistic}) for piece in pieces]


def _sums(model: Model, objective: Objective, params: Params, pieces: Sequence[Batch], how: Streaming) -> list[Tensor]:
    # no generator, which would make a RuntimeError of a layer's StopIteration
    *body, head = model.layers
    sums = []
    for piece in pieces:
        with torch.no_grad():
            x = stage_forward(body, params, (), piece, how, keep=[len(body)])[len(body)] if body else ()
            sums.append(head_value(head, objective, params, x, piece, how))
        del x  # or it would live beside the next piece's
    return sums


@dataclass(frozen=True)
class AsTasksRead(Mapping[str, Any]):
    """Parameters as tasks read them: in another dtype (None: in their own), and requiring gradients (see `requiring`).

    Each subtree is cast when it is read: they may be mapped from a file, and larger than memory.
    """

    params: Params
    dtype: torch.dtype | None

    def __getitem__(self, name: str) -> Any:
        subtree, dtype = self.params[name], self.dtype
        return requiring(subtree if dtype is None else tree.map(lambda leaf: cast(leaf, dtype), subtree))

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)
