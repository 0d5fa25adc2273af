"""Next-token prediction: supervised fine-tuning and pre-training."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.errors import BatchError
from rpfunc.objectives.objective import Objective, weighted_mean

IGNORED = -100
"""The label of a row that is not to be predicted."""


def sft() -> Objective:
    """Returns the token-level cross entropy, Σ -log softmax(logits_t)[label_{t+1}] / number of valid labels, in nats.

    Reads row leaf `labels` (B, T) int64, the tokens themselves, with -100 where no prediction is scored; row t is
    scored against label t+1, shifted once on whole rows, so T rows have at most T-1 targets. The output is logits
    (B, T, V). The normaliser counts valid labels over all microbatches; none at all gives loss 0.
    """
    return Objective("sft", prepare=_shift, total=_count, score=_cross_entropy, loss=_mean)


def _shift(batch: Batch) -> Batch:
    labels = batch.row.get("labels")
    if labels is None or labels.dim() != 2 or labels.is_floating_point():
        found = "none" if labels is None else f"{tuple(labels.shape)} {labels.dtype}"
        raise BatchError(f"sft: needs row leaf 'labels' of shape (B, T) and an integer dtype, found {found}")
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return replace(batch, row={**batch.row, "targets": targets})


def _count(batch: Batch) -> Tensor:
    valid: Tensor = batch.row["targets"] != IGNORED
    return valid.sum().double()


def _cross_entropy(logits: Float[Tensor, "batch rows vocabulary"], batch: Batch) -> Float[Tensor, "batch rows"]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = batch.row["targets"]
    losses: Tensor = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(targets.shape)


def _mean(sums: Tensor, batch: Batch, total: Tensor) -> Tensor:
    del batch
    return weighted_mean(sums, total)
