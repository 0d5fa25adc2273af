"""The usual optimizers, each a chain of a few transformations."""

from __future__ import annotations

from rpfunc.optim.adam import scale_by_adam
from rpfunc.optim.base import Transformation
from rpfunc.optim.chain import chain
from rpfunc.optim.decay import add_decayed_weights
from rpfunc.optim.scale import scale_by_learning_rate
from rpfunc.optim.schedules import Schedule
from rpfunc.optim.trace import trace
from rpfunc.tree import Mask


def sgd(
    learning_rate: float | Schedule, momentum: float | None = None, nesterov: bool = False, weight_decay: float = 0.0
) -> Transformation:
    """Returns stochastic gradient descent, p -> p - learning_rate d.

    g = gradient + weight_decay p, an L2 penalty, so momentum gathers it; t = g + momentum t. Then d is g without
    momentum, t with it, and g + momentum t if `nesterov`. All as in `torch.optim.SGD` without dampening.
    Raises OptimizerError if a number is out of its range.

    >>> import torch
    >>> params, gradients = {"w": torch.ones(1)}, {"w": torch.ones(1)}
    >>> optimizer = sgd(0.5)
    >>> optimizer.update(gradients, optimizer.init(params), params)[0]
    {'w': tensor([-0.5000])}
    """
    transformations = [scale_by_learning_rate(learning_rate)]
    if momentum is not None:
        transformations.insert(0, trace(momentum, nesterov))
    if weight_decay != 0:
        transformations.insert(0, add_decayed_weights(weight_decay))
    return chain(*transformations)


def adam(learning_rate: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Transformation:
    """Returns Adam (Kingma & Ba, 2015), as `torch.optim.Adam` without weight decay.

    Raises OptimizerError if a number is out of its range.
    """
    return chain(scale_by_adam(b1, b2, eps), scale_by_learning_rate(learning_rate))


def adamw(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Mask | None = None,
) -> Transformation:
    """Returns Adam with decoupled weight decay (Loshchilov & Hutter, 2019), as `torch.optim.AdamW`.

    The decay, learning_rate weight_decay p, follows the learning rate and bypasses the moments. `mask` selects the
    leaves that decay: see `masked`. Raises OptimizerError if a number is out of its range.

    >>> optimizer = adamw(3e-4, mask=lambda path, leaf: leaf.ndim >= 2)
    """
    return chain(
        scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )
