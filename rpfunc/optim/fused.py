"""Adam's step in one pass over memory, by the kernel that torch's own optimizers run on the CPU.

A pass reads and writes parameter and moments once, 28 bytes a parameter in float32; operation by operation it takes
about ten passes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rpfunc.optim.linear import Linear


def fused_adam_(
    param: Tensor,
    update: Tensor,
    mu: Tensor,
    nu: Tensor,
    count: Tensor,
    linear: Linear,
    *,
    b1: float,
    b2: float,
    eps: float,
) -> None:
    """Moves the moments by `update`, and adds `linear` of Adam's direction, u, to the parameter p, all in place:

        mu <- b1 mu + (1 - b1) update
        nu <- b2 nu + (1 - b2) update^2
        u = (mu / (1 - b1^count)) / (sqrt(nu / (1 - b2^count)) + eps)
        p <- p + scale u + share p

    All of one shape and on the CPU; p of any dtype, the others float32 or all float64. count: of steps, this one
    included, 0-d float32. Where cut at multiples of 64 elements, the parts have the bits of the whole, as they have
    for any number of threads. Copies are made of what is not contiguous, and of p in another dtype than the update's.
    Not to be differentiated.
    """
    scale, share = linear
    if scale == 0 and share != 0:  # the kernel knows a share only as a part of the rate
        param.add_(param, alpha=share)
        share = 0.0
    value = param if param.dtype == update.dtype else param.to(update.dtype)
    targets = (value, mu, nu)
    values = [target.contiguous() for target in targets]
    # `torch.optim.adam.adam` calls this too, after checks that take 70 us: too long for a block.
    torch._fused_adamw_(
        values[:1],
        [update.contiguous()],
        values[1:2],
        values[2:],
        [],
        [count],
        lr=-scale,
        beta1=b1,
        beta2=b2,
        weight_decay=share / scale if share else 0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    for target, result in zip((param, mu, nu), values, strict=True):
        if result is not target:
            target.copy_(result)
