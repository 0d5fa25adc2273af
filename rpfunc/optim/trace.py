"""Momentum: a decaying sum of past updates.

Source: Polyak, 1964; Sutskever et al., 'On the importance of initialization and momentum', 2013, for Nesterov's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rpfunc.optim.base import Transformation, from_leafwise
from rpfunc.optim.checks import check_decay
from rpfunc.optim.leafwise import Leafwise
from rpfunc.optim.linear import Linear
from rpfunc.optim.rows import working_dtype


def trace(decay: float, nesterov: bool = False) -> Transformation:
    """Returns the transformation u -> t, or u + decay t if `nesterov`, where t is u + decay times the last t.

    The leaf state is t, in the parameter's shape and working dtype, zero at first.
    Raises OptimizerError if `decay` is outside [0, 1).
    """
    check_decay("decay", decay, 0.9)

    def init_leaf(path: str, param: Tensor) -> Tensor:
        return torch.zeros(param.shape, dtype=working_dtype(param), device=param.device)

    def leaf(path: str, update: Tensor, past: Tensor, param: Tensor, coefficients: object) -> tuple[Tensor, Tensor]:
        total = torch.add(update, past, alpha=decay)
        return (torch.add(update, total, alpha=decay) if nesterov else total), total

    def overwrite(
        path: str, update: Tensor, past: Tensor, param: Tensor, coefficients: object, linear: Linear, scratch: Tensor
    ) -> None:
        past.mul_(decay).add_(update)
        linear.add_(param, torch.add(update, past, alpha=decay, out=scratch) if nesterov else past)

    return from_leafwise(Leafwise(leaf=leaf, init_leaf=init_leaf, overwrite=overwrite))
