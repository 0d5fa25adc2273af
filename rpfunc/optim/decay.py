"""Weight decay: a share of the parameters added to their updates."""

from __future__ import annotations

from rpfunc.optim.base import Transformation, from_leafwise
from rpfunc.optim.checks import check_not_negative
from rpfunc.optim.leafwise import from_linear
from rpfunc.optim.linear import Linear
from rpfunc.optim.masked import masked
from rpfunc.tree import Mask


def add_decayed_weights(weight_decay: float, mask: Mask | None = None) -> Transformation:
    """Returns the transformation u -> u + weight_decay p, only where `mask` holds if one is given.

    After `scale_by_adam` this is the decoupled decay of AdamW (Loshchilov & Hutter, 'Decoupled Weight Decay
    Regularization', 2019); before momentum it is an L2 penalty.
    Raises OptimizerError if `weight_decay` is negative.
    """
    check_not_negative("weight_decay", weight_decay, 0.01)

    decay = from_leafwise(from_linear(lambda state, coefficients: Linear(share=weight_decay)))
    return decay if mask is None else masked(decay, mask)
