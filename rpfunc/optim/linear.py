"""Weighing the update against the parameter, which is all that most links of a chain do.

Scaling by a rate, by a schedule or by a clipping factor, and decaying weights, are each two numbers. Links next to
each other fold into two numbers again, and these into the arithmetic of a neighbour, so that none of them costs a
pass over memory.

Source: own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Linear(NamedTuple):
    """The map u -> scale u + share p, of an update u and its parameter p. A share of 0 leaves p out, whatever it holds.

    >>> half, decay = Linear(0.5), Linear(share=0.1)
    >>> half.then(decay), decay.then(half)
    (Linear(scale=0.5, share=0.1), Linear(scale=0.5, share=0.05))
    >>> half.then(decay)(torch.tensor(2.0), torch.tensor(10.0))
    tensor(2.)
    """

    scale: float = 1.0
    share: float = 0.0

    def __call__(self, update: Tensor, param: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns scale u + share p, in `out` if given; u itself if there is nothing to do."""
        scaled = update if self.scale == 1 else torch.mul(update, self.scale, out=out)
        return scaled if self.share == 0 else torch.add(scaled, param, alpha=self.share, out=out)

    def add_(self, param: Tensor, update: Tensor) -> None:
        """Adds the value to the parameter, in place."""
        if self.share == 0:
            param.add_(update, alpha=self.scale)
        else:
            param.add_(self(update, param))

    def then(self, after: Linear) -> Linear:
        """Returns the composition, this one first."""
        if self == (1.0, 0.0):
            return after
        if after == (1.0, 0.0):
            return self
        # No share stays none, even where the scale after it is infinite.
        passed = after.scale * self.share if self.share else 0.0
        return Linear(after.scale * self.scale, passed + after.share)
