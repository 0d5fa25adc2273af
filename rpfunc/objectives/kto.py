"""Kahneman-Tversky optimisation: examples that are each desirable or not."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.objectives.checks import above, at_least, check_options, logits_problems
from rpfunc.objectives.dpo import REFERENCE
from rpfunc.objectives.logprob import score_logprob
from rpfunc.objectives.objective import Objective, weighted_mean
from rpfunc.objectives.targets import num_targets, prepare

FLAGS = {
    "desirable": "True for a completion to be made more likely",
    "kl": "True for an example that only estimates the baseline: a prompt with another prompt's completion",
}


def kto(
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    temperature: float = 1.0,
    soft_cap: float | None = None,
) -> Objective:
    """Returns the mean over examples of λ_y · (1 - σ(β (r - z0))) if desirable, λ_y · (1 - σ(β (z0 - r))) if not.

    r = log π/π_ref summed over the completion; λ_y = desirable_weight or undesirable_weight.
    z0 = max(0, mean of r over the *KL examples* of all microbatches), a constant without gradient. KL examples, flagged
    by `kl`, pair a prompt with a completion of another one and are no part of the mean. Source: KTO (arXiv 2402.01306,
    equation 8); z0 is TRL's estimate of its KL term, but of the whole batch, where TRL takes each forward batch's own.
    Without any KL example z0 is 0. Where a loss is accumulated over several calls, z0 is each call's own.

    The output is logits (B, T, V). Reads row leaf `labels` (B, T), integer, -100 outside the completion; example leaves
    `reference_logprobs` (B,), floating, log π_ref summed over the completion; `desirable` (B,), boolean; `kl` (B,),
    boolean. The normaliser is the number of examples over all microbatches that are no KL example and have a label.

    temperature, soft_cap: logits become soft_cap · tanh(logits / soft_cap) / temperature first (the reference's, too).
    Raises OptionsError; `prepare` raises BatchError.
    """
    problems = [
        above("beta", beta, 0.0, 0.1),
        at_least("desirable_weight", desirable_weight, 0.0, 1.0),
        at_least("undesirable_weight", undesirable_weight, 0.0, 1.0),
    ]
    check_options("kto", problems + logits_problems(temperature, soft_cap))

    def loss(sums: Float[Tensor, " batch"], batch: Batch, total: Tensor) -> Float[Tensor, ""]:
        gap, count = batch.constant["statistic"]
        baseline = (gap / count.clamp(min=1)).clamp(min=0)
        desirable = batch.example["desirable"]
        gain = beta * (sums - batch.example["reference_logprobs"] - baseline)
        losses = torch.where(
            desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain)
        )
        return weighted_mean(losses.where(_scored(batch), 0.0), total)

    return Objective(
        "kto",
        prepare=partial(prepare, "kto", examples={"reference_logprobs": REFERENCE}, flags=FLAGS),
        total=lambda batch: _scored(batch).sum().double(),
        score=score_logprob(temperature, soft_cap),
        loss=loss,
        linear=False,
        statistic=_kl_parts,
    )


def _scored(batch: Batch) -> Bool[Tensor, " batch"]:
    """Returns which examples enter the mean."""
    kl: Tensor = batch.example["kl"]
    return (num_targets(batch) > 0) & ~kl


def _kl_parts(sums: Float[Tensor, " batch"], batch: Batch) -> Float[Tensor, "2"]:
    """Returns (Σ log π/π_ref over KL examples, their number)."""
    kl = batch.example["kl"]  # False where an example has no target
    gap = (sums - batch.example["reference_logprobs"]).where(kl, 0.0)
    return torch.stack((gap.sum(), kl.sum().to(gap.dtype)))
