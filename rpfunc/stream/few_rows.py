"""Products of few rows with a large weight, as a head of a chunk of rows has them.

On CPUs torch's matrix product copies the weight into a layout of its own, which for few rows takes as long as the
product. oneDNN's reads it where it lies. Both directions of a head use it, so that a score has the same bits whether or
not it is differentiated. Source: own.
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
"""Rows up to which oneDNN's product is the faster one."""


class FewRowsProducts(TorchFunctionMode):
    """A context in which `F.linear` of few rows and a large weight is oneDNN's, on a CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and len(args) + len(kwargs or {}) <= 3 and _is_worth_it(*args[:2]):
            bias = args[2] if len(args) == 3 else (kwargs or {}).get("bias")
            return _Linear.apply(args[0], args[1], bias)  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns F.linear(x, weight, bias), by oneDNN where that is worth it; not to be differentiated."""
    if not _is_worth_it(x, weight):
        return F.linear(x, weight, bias)
    output: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return output


def _is_worth_it(x: Tensor | None = None, weight: Tensor | None = None) -> bool:
    if x is None or weight is None or not weight.is_cpu or weight.dim() != 2 or weight.numel() < LARGE:
        return False
    if not 0 < x.numel() <= FEW_ROWS * x.shape[-1] or not x.dtype == weight.dtype == torch.float32:
        return False  # torch's own products of 16-bit numbers are oneDNN's, which has none of wider ones
    if torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return running_transforms() in ((), ("Grad",))  # no rule for vmap, jvp or a derivative's derivative


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
            few_rows_linear(cotangent, weight.T, None) if wanted[0] else None,
            flat.T @ x.reshape(-1, x.shape[-1]) if wanted[1] else None,
            flat.sum(dim=0) if wanted[2] else None,
        )
