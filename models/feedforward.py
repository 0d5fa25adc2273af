"""What follows attention in a block: MLPs, and experts that a router picks for each row.

Each is a function of its parameters and rows (..., width). Weights are (out, in); a bias acts where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RowFunction = Callable[[Any, Tensor], Tensor]
"""(parameters, rows (..., width)) -> rows of the same shape."""

Route = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
"""(parameters, rows (n, width)) -> (experts (n, k) int64, their weights (n, k))."""

ACTIVATIONS: MappingProxyType[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
        "swish": F.silu,
    }
)
"""By the names that model configs use."""


def gated(activation: Callable[[Tensor], Tensor]) -> RowFunction:
    """Returns down(activation(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def mlp(params: dict[str, Any], x: Tensor) -> Tensor:
        return _linear(params, "down", activation(_linear(params, "gate", x)) * _linear(params, "up", x))

    return mlp


def plain(activation: Callable[[Tensor], Tensor]) -> RowFunction:
    """Returns down(activation(up(x)))."""
    return lambda params, x: _linear(params, "down", activation(_linear(params, "up", x)))


def clamped(gain: float, limit: float) -> RowFunction:
    """Returns down(g * sigmoid(gain * g) * (u + 1)), g = min(gate(x), limit), u = up(x) within it (GPT-OSS)."""

    def mlp(params: dict[str, Any], x: Tensor) -> Tensor:
        gate, up = _linear(params, "gate", x).clamp(max=limit), _linear(params, "up", x).clamp(-limit, limit)
        return _linear(params, "down", gate * torch.sigmoid(gain * gate) * (up + 1))

    return mlp


def experts(route: Route, expert: RowFunction) -> RowFunction:
    """Returns Σ over the experts that `route` picks for a row of weight * expert(row).

    Reads `experts`, a tuple of parameters for `expert`, and what `route` reads. Every expert runs, those that no row
    goes to on zero rows: so each has a gradient whatever the routing, and rows of other chunks change nothing.
    A row meets an expert once, so that no sum depends on an order. Cost: k expert rows for each row.
    """

    def mixture(params: dict[str, Any], x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = route(params, rows)
        output = torch.zeros_like(rows)
        for index, one in enumerate(params["experts"]):
            row, place = torch.where(chosen == index)
            output.index_add_(0, row, expert(one, rows[row]) * weights[row, place, None])
        return output.reshape(x.shape)

    return mixture


def softmax_then_pick(num: int, normalize: bool) -> Route:
    """Returns the `num` experts of largest softmax(router(x)), weighted by it; `normalize`: to a sum of 1 (Qwen3)."""

    def route(params: dict[str, Any], rows: Tensor) -> tuple[Tensor, Tensor]:
        logits = _linear(params, "router", rows)
        shares = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)
        chosen = _largest(shares, num)
        weights = shares.gather(1, chosen)
        if normalize:
            weights = weights / weights.sum(dim=1, keepdim=True)
        return chosen, weights.to(logits.dtype)

    return route


def pick_then_softmax(num: int) -> Route:
    """Returns the `num` experts of largest router(x), weighted by the softmax over these (GPT-OSS)."""

    def route(params: dict[str, Any], rows: Tensor) -> tuple[Tensor, Tensor]:
        logits = _linear(params, "router", rows)
        chosen = _largest(logits, num)
        return chosen, logits.gather(1, chosen).softmax(dim=1)

    return route


def _largest(scores: Tensor, num: int) -> Tensor:
    # stable: which of two equal scores comes first must not depend on what else is in the chunk
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :num]


def _linear(params: dict[str, Any], part: str, x: Tensor) -> Tensor:
    return F.linear(x, params[part], params.get(f"{part}_bias"))
