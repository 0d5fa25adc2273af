"""Log-probabilities of targets under a row's logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.errors import BatchError
from rpfunc.objectives.targets import IGNORED


def score_logprob(temperature: float, soft_cap: float | None) -> Callable[[Tensor, Batch], Tensor]:
    """Returns the row score (logits (B, T, V), batch) -> log-probability (B, T) of each row's target, 0 without one."""

    def score(logits: Float[Tensor, "batch rows vocabulary"], batch: Batch) -> Float[Tensor, "batch rows"]:
        targets: Tensor = batch.row["targets"]
        return logprob(shape_logits(logits, temperature, soft_cap), targets)

    return score


def shape_logits(
    logits: Float[Tensor, "batch rows vocabulary"], temperature: float = 1.0, soft_cap: float | None = None
) -> Float[Tensor, "batch rows vocabulary"]:
    """Returns logits that probabilities are computed from, float32 or wider: cap · tanh(logits / cap) / temperature."""
    shaped = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if soft_cap is not None:
        shaped = soft_cap * torch.tanh(shaped / soft_cap)
    return shaped if temperature == 1.0 else shaped / temperature


def logprob(
    shaped: Float[Tensor, "batch rows vocabulary"], targets: Int[Tensor, "batch rows"]
) -> Float[Tensor, "batch rows"]:
    """Returns log softmax(shaped_t)[target_t], 0 where there is no target."""
    return 0.0 - cross_entropy(shaped, targets)  # not -x, which would turn 0 into -0


def cross_entropy(
    shaped: Float[Tensor, "batch rows vocabulary"], targets: Int[Tensor, "batch rows"], label_smoothing: float = 0.0
) -> Float[Tensor, "batch rows"]:
    """Returns -(1-ε) log softmax(shaped_t)[target_t] - ε mean(log softmax(shaped_t)), 0 where there is no target.

    Raises BatchError for a target beyond the vocabulary (on a CPU; elsewhere it is the device's own error).
    """
    try:
        losses: Tensor = F.cross_entropy(
            shaped.flatten(0, 1),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    except IndexError:  # asked afterwards, since to ask before would read all targets once more
        unknown = targets[targets >= shaped.shape[-1]]
        raise BatchError(
            f"batch: row leaf 'labels' holds {unknown[0].item()}; the logits are of tokens 0 to {shaped.shape[-1] - 1}"
        ) from None
    return losses.view(targets.shape)


def entropy(shaped: Float[Tensor, "batch rows vocabulary"]) -> Float[Tensor, "batch rows"]:
    """Returns -Σ p log p of p = softmax(shaped_t), in nats; logits of -inf are tokens that cannot be."""
    finite = shaped.masked_fill(shaped == -torch.inf, 0.0)
    return shaped.logsumexp(dim=-1) - (shaped.softmax(dim=-1) * finite).sum(dim=-1)
