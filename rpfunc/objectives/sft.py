"""Next-token prediction: supervised fine-tuning and pre-training."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.objectives.checks import at_least, between, check_options, logits_problems
from rpfunc.objectives.logprob import cross_entropy, shape_logits
from rpfunc.objectives.objective import Objective, weighted_mean
from rpfunc.objectives.targets import is_target, num_tokens, prepare


def sft(
    label_smoothing: float = 0.0, z_loss: float = 0.0, temperature: float = 1.0, soft_cap: float | None = None
) -> Objective:
    """Returns the token-level cross entropy, in nats: Σ w · l / Σ w over rows with a label.

    l = -(1-ε) log p[label] - ε mean(log p) + z_loss · (log Σ exp(logits))², p = softmax(logits), ε = label_smoothing.
    Row t is scored against label t+1, shifted once on whole rows, so T rows have at most T-1 targets.

    The output is logits (B, T, V). Reads row leaf `labels` (B, T), integer, -100 where no prediction is scored, and, if
    the batch has it, row leaf `weights` (B, T), floating: w of that label, of any sign (1 where the leaf is missing).
    The normaliser is the sum of weights over all microbatches; where it is 0 (no valid label) the loss is 0.
    Give `value_and_grad` another `total` to divide by something else.

    temperature, soft_cap: logits become soft_cap · tanh(logits / soft_cap) / temperature first.
    Sources: label smoothing arXiv 1512.00567 (section 7), z-loss arXiv 2204.02311 (section 5), soft-cap arXiv
    2408.00118 (section 2).
    Raises OptionsError; `prepare` raises BatchError.

    >>> sft(label_smoothing=1.5)
    Traceback (most recent call last):
    rpfunc.errors.OptionsError: sft: label_smoothing is 1.5; it must be in [0, 1), for example 0.1
    """
    problems = [between("label_smoothing", label_smoothing, 0.0, 1.0, 0.1), at_least("z_loss", z_loss, 0.0, 1e-4)]
    check_options("sft", problems + logits_problems(temperature, soft_cap))

    def score(logits: Any, batch: Batch) -> Float[Tensor, "batch rows"]:
        shaped = shape_logits(logits, temperature, soft_cap)
        losses = cross_entropy(shaped, batch.row["targets"], label_smoothing)
        if z_loss:
            losses = losses + z_loss * shaped.logsumexp(dim=-1).square().where(is_target(batch), 0.0)
        return losses * batch.row["target_weights"] if "target_weights" in batch.row else losses

    return Objective("sft", prepare=_prepare, total=_total, score=score, loss=_mean)


def _prepare(batch: Batch) -> Batch:
    return prepare("sft", batch, tokens={"weights": ""} if "weights" in batch.row else {})


def _total(batch: Batch) -> Tensor:
    return batch.row["target_weights"].double().sum() if "target_weights" in batch.row else num_tokens(batch)


def _mean(sums: Tensor, batch: Batch, total: Tensor) -> Tensor:
    del batch
    return weighted_mean(sums, total)
