"""Which derivatives are being taken: what an operation may be replaced by depends on them."""

from __future__ import annotations

import torch
from torch import Tensor


def running_transforms() -> tuple[str, ...]:
    """Returns the names of torch.func's transforms that surround the caller, outermost first; vjp is a "Grad".

    >>> torch.vmap(lambda x: len(running_transforms()) * x)(torch.ones(2))
    tensor([1., 1.])
    """
    return tuple(level.key().name for level in torch._C._functorch.get_interpreter_stack() or ())


def is_nested(*tensors: Tensor) -> bool:
    """Returns whether what is computed from `tensors` is differentiated inside another derivative or transform.

    >>> derivative = torch.func.grad(lambda x: float(is_nested(x)) * x)
    >>> derivative(torch.ones(())), derivative(torch.ones((), requires_grad=True)).detach()
    (tensor(0.), tensor(1.))
    """
    transforms = running_transforms()
    return len(transforms) > 1 or (len(transforms) == 1 and any(_given(tensor).requires_grad for tensor in tensors))


def _given(tensor: Tensor) -> Tensor:
    """Returns the tensor as it is outside of all transforms, where torch.autograd may be at work."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
