"""Group-relative policy optimisation and its kin: DAPO, Dr. GRPO, GSPO."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.checks import is_count, shown
from rpfunc.objectives.checks import at_least, between, check_options, logits_problems, one_of
from rpfunc.objectives.logprob import score_logprob
from rpfunc.objectives.objective import Objective, weighted_mean
from rpfunc.objectives.ratios import clipped_surrogate, k3
from rpfunc.objectives.targets import is_target, num_sequences, num_targets, num_tokens, per_target, prepare

OLD = "rpfunc.logprobs(model, params, batch) computes it, before the first update"
REFERENCE = "rpfunc.logprobs(model, reference_params, batch) computes it"


def grpo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: float = 0.0,
    normalisation: Literal["token", "sequence", "length"] = "token",
    max_length: int | None = None,
    ratio: Literal["token", "sequence"] = "token",
    temperature: float = 1.0,
    soft_cap: float | None = None,
) -> Objective:
    """Returns a mean over completion tokens of -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A) + kl · k3.

    ratio          token: ρ_t = π/π_old of that token (GRPO, arXiv 2402.03300, equation 3);
                   sequence: one ρ = exp(mean over tokens of log π/π_old) a completion (GSPO, arXiv 2507.18071,
                   equations 5 and 7), not linear in the sums, so it takes two passes
    kl             weight of k3 = exp(r) - r - 1 with r = log π_ref/π of the token (arXiv 2402.03300, equation 4)
    normalisation  token: Σ / number of tokens of the batch (DAPO, arXiv 2503.14476, equation 8);
                   sequence: mean over completions of each one's mean over tokens (GRPO, GSPO);
                   length: Σ / (number of completions · max_length) (Dr. GRPO, arXiv 2503.20783, section 3.2)
    max_length     what `length` divides by, in tokens: the longest completion that could have been sampled

    All counts are over all microbatches, and of what has a label: a masked completion counts for nothing, anywhere.
    log ρ and r above 20 go on linearly (see `rpfunc.objectives.ratios`), so that no valid one overflows.

    The output is logits (B, T, V). Reads row leaf `labels` (B, T), integer, -100 outside the completion; row leaf
    `old_logprobs` (B, T), floating; if kl > 0, row leaf `reference_logprobs` (B, T), floating, place t of each about
    token t; example leaf `advantages` (B,), floating.

    temperature, soft_cap: logits become soft_cap · tanh(logits / soft_cap) / temperature first (the old ones', too).
    Raises OptionsError; `prepare` raises BatchError.
    """
    problems = [
        between("clip_low", clip_low, 0.0, 1.0, 0.2),
        at_least("clip_high", clip_high, 0.0, 0.2),
        at_least("kl", kl, 0.0, 0.04),
        one_of("normalisation", normalisation, ("token", "sequence", "length")),
        one_of("ratio", ratio, ("token", "sequence")),
    ]
    counts = max_length is not None and is_count(max_length) and max_length >= 1
    fits = counts if normalisation == "length" else max_length is None
    if not fits:
        others = "None: only 'length' reads it"
        needed = "a whole number of at least 1, for example 1024" if normalisation == "length" else others
        problems.append(f"max_length is {shown(max_length)}; with normalisation {normalisation!r} it must be {needed}")
    check_options("grpo", problems + logits_problems(temperature, soft_cap))
    score_target = score_logprob(temperature, soft_cap)

    def total(batch: Batch) -> Tensor:
        if normalisation == "token":
            return num_tokens(batch)
        return num_sequences(batch) * (max_length or 1)

    def score(logits: Any, batch: Batch) -> Float[Tensor, "batch rows ..."]:
        logprobs = score_target(logits, batch)
        log_ratio = logprobs - batch.row["target_old_logprobs"]
        penalty = kl * k3(batch.row["target_reference_logprobs"] - logprobs) if kl else torch.zeros_like(log_ratio)
        if ratio == "sequence":
            return torch.stack((log_ratio, penalty), dim=-1)
        advantages = batch.example["advantages"].unsqueeze(1).expand_as(log_ratio)
        losses = clipped_surrogate(log_ratio, advantages, clip_low, clip_high) + penalty
        return losses.where(is_target(batch), 0.0)

    def loss(sums: Float[Tensor, "batch ..."], batch: Batch, total: Tensor) -> Float[Tensor, ""]:
        if ratio == "sequence":
            log_ratio, penalty = sums.unbind(-1)
            each = clipped_surrogate(per_target(log_ratio, batch), batch.example["advantages"], clip_low, clip_high)
            sums = num_targets(batch) * each + penalty
        return weighted_mean(per_target(sums, batch) if normalisation == "sequence" else sums, total)

    tokens = {"old_logprobs": OLD} | ({"reference_logprobs": REFERENCE} if kl else {})
    return Objective(
        "grpo",
        prepare=partial(prepare, "grpo", tokens=tokens, examples={"advantages": "one number for each completion"}),
        total=total,
        score=score,
        loss=loss,
        linear=ratio == "token",
    )
