"""Adam's rescaling of updates by running averages of their first two moments.

Source: Kingma & Ba, 'Adam', 2015, algorithm 1.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from rpfunc.optim.base import Transformation, from_leafwise
from rpfunc.optim.checks import check_decay, check_not_negative
from rpfunc.optim.fused import fused_adam_
from rpfunc.optim.leafwise import Leafwise
from rpfunc.optim.linear import Linear
from rpfunc.optim.rows import working_dtype


class AdamMoments(NamedTuple):
    """Running averages of a leaf's update (mu) and its square (nu), in the parameter's shape and working dtype."""

    mu: Tensor
    nu: Tensor


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Transformation:
    """Returns the transformation u -> mu^ / (sqrt(nu^) + eps), where ^ marks averages corrected for their zero start.

    b1, b2: the share of mu and nu that a step keeps. The shared state is the count of steps, 0-d int64; a leaf's
    state is its `AdamMoments`. Moments are float32 or wider, whatever the parameters.
    Raises OptimizerError if b1 or b2 is outside [0, 1), or eps is negative.
    """
    check_decay("b1", b1, 0.9)
    check_decay("b2", b2, 0.999)
    check_not_negative("eps", eps, 1e-8)

    def init_shared() -> Tensor:
        return torch.zeros((), dtype=torch.int64)

    def init_leaf(path: str, param: Tensor) -> AdamMoments:
        dtype = working_dtype(param)
        zeros = [torch.zeros(param.shape, dtype=dtype, device=param.device) for _ in range(2)]
        return AdamMoments(*zeros)

    def scalars(count: Tensor, total: float | None) -> tuple[Tensor, Tensor]:
        count = count + 1
        return count.to(torch.float32), count

    def leaf(
        path: str, update: Tensor, moments: AdamMoments, param: Tensor, count: Tensor
    ) -> tuple[Tensor, AdamMoments]:
        c1, c2 = 1 - b1 ** int(count), 1 - b2 ** int(count)
        mu = torch.lerp(moments.mu, update, 1 - b1)
        nu = (moments.nu * b2).addcmul_(update, update, value=1 - b2)
        # (mu / c1) / (sqrt(nu / c2) + eps), with the numbers gathered so that each tensor is passed over less often
        denominator = nu.sqrt().mul(c1 / sqrt(c2)).add_(c1 * eps)
        return mu / denominator, AdamMoments(mu, nu)

    def overwrite(
        path: str, update: Tensor, moments: AdamMoments, param: Tensor, count: Tensor, linear: Linear, scratch: Tensor
    ) -> None:
        if param.device.type == "cpu":
            fused_adam_(param, update, *moments, count, linear, b1=b1, b2=b2, eps=eps)
            return
        update, values = leaf(path, update, moments, param, count)
        for moment, value in zip(moments, values, strict=True):
            moment.copy_(value)
        linear.add_(param, update)

    return from_leafwise(
        Leafwise(leaf=leaf, init_leaf=init_leaf, init_shared=init_shared, scalars=scalars, overwrite=overwrite)
    )
