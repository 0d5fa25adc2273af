"""An identity whose backward pass does what a test says, such as raising."""

import torch


def identity(x, act):
    """Returns a copy of x, whose gradient calls act()."""
    return _Identity.apply(x, act)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(x, act):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.act = inputs[1]

    @staticmethod
    def backward(ctx, dy):
        return ctx.act(), None
