"""Log-probabilities of targets under a row's logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

from rpfunc.batch import Batch
from rpfunc.errors import BatchError, ModelError
from rpfunc.objectives.targets import IGNORED

BLOCK = 1 << 18
"""Logits whose exponentials are summed at a time."""


def score_logprob(temperature: float, soft_cap: float | None) -> Callable[[Tensor, Batch], Tensor]:
    """Returns the row score (logits (B, T, V), batch) -> log-probability (B, T) of each row's target, 0 without one."""

    def score(logits: Any, batch: Batch) -> Float[Tensor, "batch rows"]:
        targets: Tensor = batch.row["targets"]
        return logprob(shape_logits(logits, temperature, soft_cap), targets)

    return score


def shape_logits(
    logits: Any, temperature: float = 1.0, soft_cap: float | None = None
) -> Float[Tensor, "batch rows vocabulary"]:
    """Returns logits that probabilities are computed from, float32 or wider: cap · tanh(logits / cap) / temperature.

    Raises ModelError for what are no logits (B, T, V).
    """
    if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.is_floating_point():
        raise ModelError(f"output: the last layer gives {described(logits)}; needs floating-point logits (B, T, V)")
    shaped = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if soft_cap is not None:
        shaped = soft_cap * torch.tanh(shaped / soft_cap)
    return shaped if temperature == 1.0 else shaped / temperature


def described(output: Any) -> str:
    """Returns what a model's output is, in words."""
    if isinstance(output, Tensor):
        return f"{tuple(output.shape)} {output.dtype}"
    return f"a {type(output).__name__}" + (f" of {sorted(map(str, output))}" if isinstance(output, Mapping) else "")


def logprob(shaped: Float[Tensor, "_ _ vocabulary"], targets: Int[Tensor, "batch rows"]) -> Float[Tensor, "batch rows"]:
    """Returns log softmax(shaped_t)[target_t], 0 where there is no target."""
    return 0.0 - cross_entropy(shaped, targets)  # not -x, which would turn 0 into -0


def cross_entropy(
    shaped: Float[Tensor, "_ _ vocabulary"], targets: Int[Tensor, "batch rows"], label_smoothing: float = 0.0
) -> Float[Tensor, "batch rows"]:
    """Returns -(1-ε) log softmax(shaped_t)[target_t] - ε mean(log softmax(shaped_t)), 0 where there is no target.

    Raises BatchError for a target beyond the vocabulary (on a CPU; elsewhere it is the device's own error), ModelError
    for logits of other rows.
    """
    if shaped.shape[:2] != targets.shape:
        raise ModelError(
            f"output: the last layer gives logits of {tuple(shaped.shape[:2])} examples and rows, the batch has "
            f"{tuple(targets.shape)}; a row of logits is needed for each row of the batch"
        )
    try:
        losses: Tensor = _CrossEntropy.apply(shaped.flatten(0, 1), targets.flatten(), label_smoothing)[0]  # type: ignore[no-untyped-call]
    except RuntimeError:  # asked afterwards, since to ask before would read all targets once more
        unknown = targets[targets >= shaped.shape[-1]]
        if not len(unknown):
            raise
        raise BatchError(
            f"batch: row leaf 'labels' holds {unknown[0].item()}; the logits are of tokens 0 to {shaped.shape[-1] - 1}"
        ) from None
    return losses.view(targets.shape)


class _CrossEntropy(Function):
    """See `cross_entropy`, of logits (n, V). Beside the logits one tensor of their size exists, on the way back.

    What it makes has the logits' own strides: a head may leave them with the vocabulary as the slower dimension.
    """

    @staticmethod
    def forward(shaped: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        # a few rows at a time, so that what it makes on the way stays in a CPU's cache; others want larger pieces
        count = max(1, (BLOCK if shaped.is_cpu else 64 * BLOCK) // max(1, shaped.shape[1]))
        parts = torch.split(shaped, count)
        log_sum = torch.cat([part.logsumexp(dim=1) for part in parts])
        picked = shaped.gather(1, targets.clamp(min=0)[:, None])[:, 0]
        if smoothing:
            picked = torch.lerp(picked, shaped.mean(dim=1), smoothing)
        return (log_sum - picked).masked_fill_(targets == IGNORED, 0.0), log_sum

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        shaped, targets, ctx.smoothing = inputs
        ctx.save_for_backward(shaped, targets, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: None) -> tuple[Tensor, None, None]:
        shaped, targets, log_sum = ctx.saved_tensors
        cotangent = cotangent.masked_fill(targets == IGNORED, 0.0)[:, None]
        places, share = targets.clamp(min=0)[:, None], ctx.smoothing / shaped.shape[1]
        if torch.is_grad_enabled():  # this derivative may be differentiated: nothing that it needs is overwritten
            gradient = (torch.exp(shaped - shaped.logsumexp(dim=1, keepdim=True)) - share) * cotangent
        else:
            gradient = torch.sub(shaped, log_sum[:, None]).exp_()
            if share:
                gradient.sub_(share)
            gradient.mul_(cotangent)
        return gradient.scatter_add_(1, places, (ctx.smoothing - 1.0) * cotangent), None, None


def entropy(shaped: Float[Tensor, "batch rows vocabulary"]) -> Float[Tensor, "batch rows"]:
    """Returns -Σ p log p of p = softmax(shaped_t), in nats; logits of -inf are tokens that cannot be."""
    finite = shaped.masked_fill(shaped == -torch.inf, 0.0)
    return shaped.logsumexp(dim=-1) - (shaped.softmax(dim=-1) * finite).sum(dim=-1)
