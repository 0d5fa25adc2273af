"""Odds-ratio preference optimisation: fine-tuning and preference in one."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.objectives.checks import at_least, check_options, logits_problems
from rpfunc.objectives.logprob import score_logprob
from rpfunc.objectives.objective import Objective
from rpfunc.objectives.pairs import chosen_rejected, num_pairs, pair_mean
from rpfunc.objectives.targets import per_target, prepare


def orpo(beta: float = 0.1, temperature: float = 1.0, soft_cap: float | None = None) -> Objective:
    """Returns the mean over preference pairs of -m_chosen - β log σ(log odds(m_chosen) - log odds(m_rejected)).

    m is the mean log-probability of a completion's tokens, odds(m) = e^m / (1 - e^m); β is the paper's λ. The first
    term is a mean over tokens in each pair, then over pairs. Source: ORPO (arXiv 2403.07691, equations 4 to 7).
    m above -2^-52 (a completion that is certain) counts as -2^-52, where the odds are still finite.

    The output is logits (B, T, V). Reads a batch of group_size 2, examples 2i chosen and 2i+1 rejected: row leaf
    `labels` (B, T), integer, -100 outside the completion. The normaliser is the number of pairs over all microbatches;
    a pair of which one completion has no label counts for nothing.

    temperature, soft_cap: logits become soft_cap · tanh(logits / soft_cap) / temperature first.
    Raises OptionsError; `prepare` raises BatchError.
    """
    check_options("orpo", [at_least("beta", beta, 0.0, 0.1), *logits_problems(temperature, soft_cap)])

    def loss(sums: Float[Tensor, " batch"], batch: Batch, total: Tensor) -> Float[Tensor, ""]:
        chosen, rejected = chosen_rejected(per_target(sums, batch))
        losses = -chosen - beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
        return pair_mean(losses, batch, total)

    return Objective(
        "orpo",
        prepare=partial(prepare, "orpo", pairs=True),
        total=num_pairs,
        score=score_logprob(temperature, soft_cap),
        loss=loss,
        linear=False,
    )


def _log_odds(mean_logprob: Tensor) -> Tensor:
    certain = -torch.finfo(mean_logprob.dtype).eps
    bounded = mean_logprob.clamp(max=certain)
    return bounded - torch.log(-torch.expm1(bounded))
