"""rpfunc's optimizers against torch.optim, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rpfunc import optim

NUM_STEPS = 20

CASES: dict[str, tuple[optim.Transformation, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (optim.sgd(0.1), lambda params: torch.optim.SGD(params, lr=0.1)),
    "sgd-momentum": (
        optim.sgd(0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ),
    "sgd-nesterov-decay": (
        optim.sgd(0.1, momentum=0.8, nesterov=True, weight_decay=0.05),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.05),
    ),
    "sgd-decay": (
        optim.sgd(0.1, weight_decay=0.05),
        lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.05),
    ),
    "adam": (
        optim.adam(0.02, b1=0.8, b2=0.95, eps=1e-3),
        lambda params: torch.optim.Adam(params, lr=0.02, betas=(0.8, 0.95), eps=1e-3),
    ),
    "adamw": (
        optim.adamw(0.02, weight_decay=0.3),
        lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.3),
    ),
    "adamw-defaults": (optim.adamw(1e-3), lambda params: torch.optim.AdamW(params)),
    "adamw-no-b1": (
        optim.adamw(0.02, b1=0.0, b2=0.5, weight_decay=0.0),
        lambda params: torch.optim.AdamW(params, lr=0.02, betas=(0.0, 0.5), weight_decay=0.0),
    ),
}


def check_equals_torch(
    optimizer: optim.Transformation,
    make_torch: Callable[[Any], torch.optim.Optimizer],
    step: Callable[..., Any] = optim.step,
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"bias": (3,), "scalar": (), "weight": (4, 3)}
    params = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in shapes.items()}
    modules = {key: torch.nn.Parameter(param.clone()) for key, param in params.items()}
    reference = make_torch(modules.values())
    state = optimizer.init(params)
    for _ in range(NUM_STEPS):
        gradients = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in shapes.items()}
        params, state = step(optimizer, gradients, state, params)
        for key, module in modules.items():
            module.grad = gradients[key]
        reference.step()
    for key, module in modules.items():
        torch.testing.assert_close(params[key], module.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("step", [optim.step, optim.step_donated], ids=["pure", "donated"])
@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name: str, step: Callable[..., Any]) -> None:
    check_equals_torch(*CASES[name], step)


def test_clipping_equals_torch() -> None:
    gradient = torch.tensor([3.0, -4.0, 12.0], dtype=torch.float64)
    optimizer = optim.clip_by_global_norm(2.0)
    found, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], 2.0)
    assert optim.global_norm(gradient) == norm.item() == 13.0
    torch.testing.assert_close(found, parameter.grad, rtol=1e-6, atol=0)  # torch divides by norm + 1e-6
