"""Norms over the last dimension, as functions of their parameters and rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Norm = Callable[[Any, Tensor], Tensor]
"""(parameters, rows (..., width)) -> rows of the same shape."""


def rms(epsilon: float) -> Norm:
    """Returns the norm x / sqrt(mean(x^2) + epsilon) * scale, parameters being the scale (width,); arXiv 1910.07467."""
    return lambda scale, x: _rms(x, scale, epsilon)


def rms_from_one(epsilon: float) -> Norm:
    """Returns the norm x / sqrt(mean(x^2) + epsilon) * (1 + scale), as Gemma has it: a scale of zero does nothing."""
    return lambda scale, x: _rms(x, 1 + scale, epsilon)


def layer(epsilon: float) -> Norm:
    """Returns the norm (x - mean(x)) / sqrt(variance(x) + epsilon) * scale + bias (arXiv 1607.06450)."""

    def norm(params: dict[str, Tensor], x: Tensor) -> Tensor:
        scale, bias = params["scale"], params["bias"]
        wide = torch.promote_types(x.dtype, torch.promote_types(scale.dtype, bias.dtype))  # as below
        return F.layer_norm(x.to(wide), (x.shape[-1],), scale.to(wide), bias.to(wide), epsilon).to(x.dtype)

    return norm


def _rms(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    if scale.dtype == x.dtype:
        return F.rms_norm(x, (x.shape[-1],), scale, epsilon)
    wide = torch.promote_types(x.dtype, scale.dtype)  # a norm may be kept wider than the rows
    return F.rms_norm(x.to(wide), (x.shape[-1],), scale.to(wide), epsilon).to(x.dtype)
