"""Products of few rows with a large weight, as a head of a chunk of rows has them.

On CPUs a matrix product with few rows on the left reaches half the speed of one with many. Computed the other way
round, with the weight's rows on the left, it does not. Both directions of a head use it, so that a score has the same
bits whether or not it is differentiated. Source: own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from rpfunc.stream.transforms import running_transforms

LARGE = 1 << 20
"""Elements of a weight from which its products are treated apart; below, what that saves is less than it costs."""

FEW_ROWS = 128
"""Rows up to which a product is computed the other way round."""

BLOCK = 4000
"""Rows of a weight whose products with few rows stay in the cache."""


class FewRowsProducts(TorchFunctionMode):
    """A context in which `F.linear` of few rows and a large weight is computed the other way round, on a CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and len(args) + len(kwargs or {}) <= 3 and _is_worth_it(*args[:2]):
            bias = args[2] if len(args) == 3 else (kwargs or {}).get("bias")
            return _Linear.apply(args[0], args[1], bias)  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns F.linear(x, weight, bias), the other way round where that is worth it; not to be differentiated."""
    if not _is_worth_it(x, weight):
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1]).T
    output = x.new_empty(flat.shape[1], len(weight))
    for start in range(0, len(weight), BLOCK):
        output[:, start : start + BLOCK] = (weight[start : start + BLOCK] @ flat).T
    if bias is not None:
        output += bias
    return output.reshape(*x.shape[:-1], len(weight))


def _is_worth_it(x: Tensor | None = None, weight: Tensor | None = None) -> bool:
    if x is None or weight is None or not weight.is_cpu or weight.dim() != 2 or weight.numel() < LARGE:
        return False
    if not 0 < x.numel() <= FEW_ROWS * x.shape[-1] or weight.is_complex() or torch.is_autocast_enabled("cpu"):
        return False
    return all(transform == "Grad" for transform in running_transforms())  # it has no rule for vmap or jvp


class _Linear(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return few_rows_linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = cotangent.reshape(-1, cotangent.shape[-1])
        wanted = ctx.needs_input_grad
        return (
            cotangent @ weight if wanted[0] else None,
            flat.T @ x.reshape(-1, x.shape[-1]) if wanted[1] else None,
            flat.sum(dim=0) if wanted[2] else None,
        )
