"""Direct preference optimisation."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.objectives.checks import above, between, check_options, logits_problems, one_of
from rpfunc.objectives.logprob import score_logprob
from rpfunc.objectives.objective import Objective
from rpfunc.objectives.pairs import chosen_rejected, num_pairs, pair_mean
from rpfunc.objectives.targets import per_target, prepare

REFERENCE = "rpfunc.logprobs(model, reference_params, batch).sum(1) computes it"
"""Where `reference_logprobs` of whole completions come from."""


def dpo(
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    variant: Literal["sigmoid", "ipo"] = "sigmoid",
    temperature: float = 1.0,
    soft_cap: float | None = None,
) -> Objective:
    """Returns the mean over preference pairs of a loss of Δ = (log π/π_ref)(chosen) - (log π/π_ref)(rejected).

    sigmoid  -(1-ε) log σ(βΔ) - ε log σ(-βΔ), log π a sum over the completion's tokens, ε = label_smoothing.
             DPO (arXiv 2305.18290, equation 7), with ε conservative DPO (Mitchell 2023)
    ipo      (Δ - 1/(2β))², log π/π_ref a *mean* over the completion's tokens. IPO (arXiv 2310.12036, equation 17) has
             the sum; TRL has the mean, on its authors' word, so that β means the same at any length

    The output is logits (B, T, V). Reads a batch of group_size 2, examples 2i chosen and 2i+1 rejected: row leaf
    `labels` (B, T), integer, -100 outside the completion; example leaf `reference_logprobs` (B,), floating, log π_ref
    summed over the completion. The normaliser is the number of pairs over all microbatches; a pair of which one
    completion has no label counts for nothing.

    temperature, soft_cap: logits become soft_cap · tanh(logits / soft_cap) / temperature first (the reference's, too).
    Raises OptionsError; `prepare` raises BatchError.
    """
    problems = [
        above("beta", beta, 0.0, 0.1),
        between("label_smoothing", label_smoothing, 0.0, 0.5, 0.1),
        one_of("variant", variant, ("sigmoid", "ipo")),
    ]
    if variant == "ipo" and label_smoothing:
        problems.append(f"label_smoothing is {label_smoothing}; variant 'ipo' has none, so it must be 0")
    check_options("dpo", problems + logits_problems(temperature, soft_cap))

    def loss(sums: Float[Tensor, " batch"], batch: Batch, total: Tensor) -> Float[Tensor, ""]:
        log_ratio = sums - batch.example["reference_logprobs"]
        chosen, rejected = chosen_rejected(per_target(log_ratio, batch) if variant == "ipo" else log_ratio)
        if variant == "ipo":
            losses = (chosen - rejected - 1 / (2 * beta)).square()
        else:
            margin = beta * (chosen - rejected)
            losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
        return pair_mean(losses, batch, total)

    return Objective(
        "dpo",
        prepare=partial(prepare, "dpo", examples={"reference_logprobs": REFERENCE}, pairs=True),
        total=num_pairs,
        score=score_logprob(temperature, soft_cap),
        loss=loss,
        linear=False,
    )
