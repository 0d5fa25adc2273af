"""Proximal policy optimisation with a value head."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.errors import ModelError
from rpfunc.objectives.checks import above, at_least, between, check_options, logits_problems
from rpfunc.objectives.grpo import OLD
from rpfunc.objectives.logprob import described, entropy, logprob, shape_logits
from rpfunc.objectives.objective import Objective, weighted_mean
from rpfunc.objectives.ratios import clipped_surrogate
from rpfunc.objectives.targets import is_target, num_tokens, prepare


def ppo(
    clip: float = 0.2,
    value_clip: float | None = 0.2,
    value_coefficient: float = 0.5,
    entropy_coefficient: float = 0.0,
    temperature: float = 1.0,
    soft_cap: float | None = None,
) -> Objective:
    """Returns the mean over completion tokens of L_policy + value_coefficient · L_value - entropy_coefficient · H.

    L_policy  -min(ρ A, clip(ρ, 1 - clip, 1 + clip) A), ρ = π/π_old of the token (PPO, arXiv 1707.06347, equation 7)
    L_value   max((v - R)², (v_old + clip(v - v_old, ±value_clip) - R)²), or (v - R)² if value_clip is None
              (equation 9; clipping as in its authors' code, which has half of this)
    H         entropy of softmax(logits), of the row that predicts the token

    The output is {"logits": (B, T, V), "values": (B, T)}; row t's value belongs, like its logits, to token t+1. Reads
    row leaf `labels` (B, T), integer, -100 outside the completion, and row leaves (B, T), floating, place t about token
    t: `old_logprobs`, `advantages`, `returns`, and, with a value_clip, `old_values` (the value before that token).
    The normaliser is the number of labels over all microbatches.
    log ρ above 20 goes on linearly (see `rpfunc.objectives.ratios`), so that no valid one overflows.

    temperature, soft_cap: logits become soft_cap · tanh(logits / soft_cap) / temperature first (the old ones', too).
    Raises OptionsError; `prepare` raises BatchError.
    """
    problems = [
        between("clip", clip, 0.0, 1.0, 0.2),
        None if value_clip is None else above("value_clip", value_clip, 0.0, 0.2),
        at_least("value_coefficient", value_coefficient, 0.0, 0.5),
        at_least("entropy_coefficient", entropy_coefficient, 0.0, 0.01),
    ]
    check_options("ppo", problems + logits_problems(temperature, soft_cap))

    def score(output: Any, batch: Batch) -> Float[Tensor, "batch rows"]:
        valid = is_target(batch)
        values = output.get("values") if isinstance(output, Mapping) and "logits" in output else None
        if not isinstance(values, Tensor) or values.shape != valid.shape:
            given = described(output) if values is None else f"'values' {described(values)}"
            raise ModelError(
                f"output: the last layer gives {given}; ppo needs {{'logits': (B, T, V), 'values': (B, T)}}, here "
                f"values {tuple(valid.shape)}: a head of logits with a value head beside it"
            )
        shaped = shape_logits(output["logits"], temperature, soft_cap)
        log_ratio = logprob(shaped, batch.row["targets"]) - batch.row["target_old_logprobs"]
        losses = clipped_surrogate(log_ratio, batch.row["target_advantages"], clip, clip)
        values = values.masked_fill(~valid, 0.0).to(shaped.dtype)
        losses = losses + value_coefficient * value_loss(values, batch)
        if entropy_coefficient:
            losses = losses - entropy_coefficient * entropy(shaped)
        return losses.where(valid, 0.0)

    def value_loss(values: Float[Tensor, "batch rows"], batch: Batch) -> Float[Tensor, "batch rows"]:
        returns: Tensor = batch.row["target_returns"]
        error = (values - returns).square()
        if value_clip is None:
            return error
        old: Tensor = batch.row["target_old_values"]
        return error.maximum((old + (values - old).clamp(-value_clip, value_clip) - returns).square())

    tokens = {"old_logprobs": OLD, "advantages": "", "returns": ""} | ({} if value_clip is None else {"old_values": ""})
    return Objective("ppo", partial(prepare, "ppo", tokens=tokens), num_tokens, score, _mean)


def _mean(sums: Tensor, batch: Batch, total: Tensor) -> Tensor:
    del batch
    return weighted_mean(sums, total)
