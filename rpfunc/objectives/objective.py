"""Objectives: a loss of the form F(Σ over rows of s)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rpfunc.batch import Batch


@dataclass(frozen=True)
class Objective:
    """The loss Σ over microbatches of F(Σ over rows of s), in pure functions.

    prepare    whole batch -> batch: run once before any cut (labels are shifted here); adds the leaves `score` reads
    total      prepared batch -> (): the batch-wide denominator, a sum over examples; adds up over accumulated batches
    score      (output (B, T, ...), batch) -> s (B, T) or (B, T, K): row scores, each of its own row alone
    loss       (sums (B) or (B, K) float64, batch, total) -> (): these examples' share F of the loss, float64
    linear     F is linear in the sums, so that its derivative is known before they are
    statistic  (sums, microbatch) -> additive parts of a number about the whole batch that F needs. They are found by a
               forward pass over all microbatches before any gradient is taken, and added up; `loss` finds the result
               in `batch.constant["statistic"]`, as a constant. None: F needs no such number

    A batch whose total is 0 has loss 0 and zero gradients. `rpfunc.testing.assert_streams_objective` proves one right.

    The squared error of a model's output (B, T, 1), averaged over the rows that have a label; what a row without one
    holds has no effect, nan neither:

    >>> import torch
    >>> def score(output, batch):
    ...     counts = batch.row["labels"] != -100
    ...     return torch.where(counts, output[..., 0] - batch.row["wanted"], 0.0).square()
    >>> def count(batch):
    ...     return (batch.row["labels"] != -100).sum().double()
    >>> def mean(sums, batch, total):
    ...     return weighted_mean(sums, total)
    >>> squared = Objective("squared", lambda batch: batch, count, score, mean)

    and the proof, on batches in which three labels of ten are missing:

    >>> from rpfunc.testing import assert_streams_objective
    >>> def draw_batch(examples, rows, seed):
    ...     draws = torch.rand(2, examples, rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ...     return Batch(row={"labels": torch.where(draws[0] < 0.3, -100, 0), "wanted": draws[1]})
    >>> def draw_output(examples, rows, generator):
    ...     return torch.randn(examples, rows, 1, generator=generator, dtype=torch.float64)
    >>> assert_streams_objective(squared, draw_batch, 1, make_output=draw_output, shifted=False)
    """

    name: str
    prepare: Callable[[Batch], Batch]
    total: Callable[[Batch], Tensor]
    score: Callable[[Any, Batch], Tensor]
    loss: Callable[[Tensor, Batch, Tensor], Tensor]
    linear: bool = True
    statistic: Callable[[Tensor, Batch], Tensor] | None = None


def weighted_mean(sums: Tensor, total: Tensor) -> Tensor:
    """Returns Σ sums / total, and 0 with zero gradients where total is 0 (no valid label in the whole batch)."""
    safe = total.where(total != 0, 1.0)
    return (sums.sum() / safe).where(total != 0, 0.0)
