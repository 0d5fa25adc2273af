"""Importance ratios π/π_old of policy-gradient objectives, and their clipped surrogate."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Above this, exp goes on as its tangent, 4.9e8 · (1 + x - 20): no valid log-ratio overflows float32, and the gradient
keeps its sign. (Only the gradient of float16 logits may overflow, as it may anyway, and be skipped.)
"""


def tangent_exp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns exp(x), and its tangent at LOG_RATIO_LIMIT beyond that; differentiable everywhere."""
    low = x.clamp(max=LOG_RATIO_LIMIT)
    return low.exp() * (1.0 + (x - low))


def clipped_surrogate(
    log_ratio: Float[Tensor, "*shape"], advantages: Float[Tensor, "*shape"], clip_low: float, clip_high: float
) -> Float[Tensor, "*shape"]:
    """Returns -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A) with ρ = exp(log_ratio).

    Source: PPO (arXiv 1707.06347, equation 7); two bounds: DAPO (arXiv 2503.14476, equation 10).
    """
    ratio = tangent_exp(log_ratio)
    return -(ratio * advantages).minimum(ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)


def k3(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns exp(r) - r - 1 with r = log π_ref - log π: at samples of π, an unbiased estimate of KL(π‖π_ref) >= 0.

    Source: Schulman, Approximating KL Divergence (2020); GRPO (arXiv 2402.03300, equation 4).
    """
    return tangent_exp(log_ratio) - log_ratio - 1.0
