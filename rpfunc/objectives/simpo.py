"""Simple preference optimisation: no reference model."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.objectives.checks import above, at_least, check_options, logits_problems
from rpfunc.objectives.logprob import score_logprob
from rpfunc.objectives.objective import Objective
from rpfunc.objectives.pairs import chosen_rejected, num_pairs, pair_mean
from rpfunc.objectives.targets import per_target, prepare


def simpo(beta: float = 2.0, gamma: float = 0.5, temperature: float = 1.0, soft_cap: float | None = None) -> Objective:
    """Returns the mean over preference pairs of -log σ(β (m_chosen - m_rejected) - γ).

    m is the mean log-probability of a completion's tokens. Source: SimPO (arXiv 2405.14734, equation 6).

    The output is logits (B, T, V). Reads a batch of group_size 2, examples 2i chosen and 2i+1 rejected: row leaf
    `labels` (B, T), integer, -100 outside the completion. The normaliser is the number of pairs over all microbatches;
    a pair of which one completion has no label counts for nothing.

    temperature, soft_cap: logits become soft_cap · tanh(logits / soft_cap) / temperature first.
    Raises OptionsError; `prepare` raises BatchError.
    """
    problems = [above("beta", beta, 0.0, 2.0), at_least("gamma", gamma, 0.0, 0.5)]
    check_options("simpo", problems + logits_problems(temperature, soft_cap))

    def loss(sums: Float[Tensor, " batch"], batch: Batch, total: Tensor) -> Float[Tensor, ""]:
        chosen, rejected = chosen_rejected(per_target(sums, batch))
        return pair_mean(-F.logsigmoid(beta * (chosen - rejected) - gamma), batch, total)

    return Objective(
        "simpo",
        prepare=partial(prepare, "simpo", pairs=True),
        total=num_pairs,
        score=score_logprob(temperature, soft_cap),
        loss=loss,
        linear=False,
    )
