"""Optimizers that are wrong on purpose, each of which the checks of the suite must notice."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rpfunc import optim, tree
from rpfunc.optim import Leafwise, Transformation, from_leafwise
from rpfunc.optim.fused import fused_adam_


def load(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / name
    spec = importlib.util.spec_from_file_location(f"meta_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Hypothesis and dataclasses look for it
    spec.loader.exec_module(module)
    return module


cases = load("unit/test_optim_cases.py")
against_torch = load("unit/test_optim_torch.py")
equal_bits = load("property/test_optim_equal_bits.py")
arithmetic = load("property/test_optim_arithmetic.py")


def count_incremented_before_use(schedule: optim.Schedule) -> Transformation:
    return optim.sgd(lambda count: schedule(count + 1))


def decay_on_every_call() -> Transformation:
    adam = optim.accumulate(optim.scale_by_adam(), every=4)
    return optim.chain(adam, optim.add_decayed_weights(0.1), optim.scale_by_learning_rate(0.01))


def positive_zero_between_updates() -> Transformation:
    inner = optim.accumulate(optim.adamw(0.01, weight_decay=0.1), every=4)
    return optim.chain(inner, optim.scale(-1.0), optim.scale(-1.0), optim.scale(1.0), add(0.0))


def adam_at_every_call() -> Transformation:
    return optim.chain(optim.scale(0.25), optim.adamw(0.01, weight_decay=0.1))


def add(number: float) -> Transformation:
    return from_leafwise(Leafwise(leaf=lambda path, update, state, param, coefficients: (update + number, state)))


def clip_by_leaf_norm(max_norm: float) -> Transformation:
    def leaf(path: str, update: Tensor, state: Any, param: Tensor, coefficients: Any) -> tuple[Tensor, Any]:
        norm = float(update.norm())
        return (update * (max_norm / norm) if norm > max_norm else update), state

    return from_leafwise(
        Leafwise(leaf=leaf, reduce=lambda path, update, state, shared: float(update.square().sum()), elementwise=False)
    )


def clip_up(max_norm: float) -> Transformation:
    return clip_by_factor(lambda norm: max_norm / norm if norm else 1.0)


def clip_with_epsilon(max_norm: float) -> Transformation:
    return clip_by_factor(lambda norm: min(max_norm / (norm + 1e-6), 1.0))


def clip_in_float32(max_norm: float) -> Transformation:
    return clip_by_factor(lambda norm: min(max_norm / norm, 1.0) if norm else 1.0, dtype=torch.float32)


def clip_by_factor(factor: Callable[[float], float], dtype: torch.dtype = torch.float64) -> Transformation:
    return from_leafwise(
        Leafwise(
            leaf=lambda path, update, state, param, coefficient: (update * coefficient, state),
            reduce=lambda path, update, state, shared: float(update.to(dtype).square().sum()),
            scalars=lambda shared, total: (factor((total or 0.0) ** 0.5), shared),
        )
    )


def adam_with(direction: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype | None = None) -> Transformation:
    """Adam by the book, but for the direction taken from the two corrected moments, or the dtype of these."""

    def init(params: Any) -> Any:
        zeros = tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=dtype or leaf.dtype), params)
        return torch.zeros((), dtype=torch.int64), zeros, zeros

    def update(updates: Any, state: Any, params: Any) -> Any:
        count, mu, nu = state
        count = count + 1
        mu = tree.map(lambda past, new: (0.9 * past + 0.1 * new).to(past.dtype), mu, updates)
        nu = tree.map(lambda past, new: (0.999 * past + 0.001 * new * new).to(past.dtype), nu, updates)
        corrections = (1 - 0.9 ** int(count), 1 - 0.999 ** int(count))
        return tree.map(lambda m, v: direction(m / corrections[0], v / corrections[1]), mu, nu), (count, mu, nu)

    return optim.chain(Transformation(init, update), optim.scale_by_learning_rate(0.02))


def right_direction(mu: Tensor, nu: Tensor) -> Tensor:
    return mu / (nu.sqrt() + 1e-3)


def eps_inside_root(mu: Tensor, nu: Tensor) -> Tensor:
    return mu / (nu + 1e-3).sqrt()


def no_correction_of_nu(mu: Tensor, nu: Tensor) -> Tensor:
    return mu / ((nu * 0.001).sqrt() + 1e-3)


def torch_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02, eps=1e-3)


def torch_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.3)


def check_bits(transformation: Transformation) -> None:
    params = {"a": torch.randn(70, generator=torch.Generator().manual_seed(0)), "b": torch.ones(2, 3)}
    gradients = [tree.map(lambda leaf: leaf * 2 - 1, params)] * 2
    equal_bits.check_equal_bits(transformation, params, gradients, 3, ["b", "a"])


def overwrites_its_state(path: str, update: Tensor, state: Tensor, param: Tensor, coefficients: Any) -> Any:
    state.mul_(0.5).add_(update)
    return update - state, state


def overwrites_its_update(path: str, update: Tensor, state: Any, param: Tensor, coefficients: Any) -> Any:
    return update.mul_(-0.1), state


def says_elementwise(path: str, update: Tensor, state: Any, param: Tensor, coefficients: Any) -> Any:
    return update - update.mean(), state


def adam_that(**changes: Any) -> Transformation:
    """Adam and a decay, as one leafwise transformation with some of its fields replaced."""
    leafwise = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, weight_decay=0.5)).leafwise
    assert leafwise is not None
    return from_leafwise(replace(leafwise, **changes))


def overwrite(change: Callable[..., tuple[Any, ...]]) -> Transformation:
    """The same, whose step in one is given other arguments than it should be."""
    inner = adam_that().leafwise
    assert inner is not None
    assert inner.overwrite is not None
    right = inner.overwrite
    return adam_that(overwrite=lambda *arguments: right(*change(*arguments)))


def forgets_what_follows(*arguments: Any) -> tuple[Any, ...]:
    *others, _, scratch = arguments
    return *others, optim.Linear(), scratch


def writes_over_the_update(path: str, update: Tensor, *others: Any) -> tuple[Any, ...]:
    return path, update.mul_(0.5), *others


def keeps_its_moments(path: str, update: Tensor, state: Any, *others: Any) -> tuple[Any, ...]:
    return path, update, tree.map(torch.clone, state), *others


def treats_a_block_as_a_whole(path: str, update: Tensor, *others: Any) -> tuple[Any, ...]:
    return path, update - update.mean(), *others


def linear_that_is_not(**numbers: float) -> Transformation:
    """Says that it does something else than it does."""
    leaf = lambda path, update, state, param, coefficients: (update * 0.5, state)  # noqa: E731
    return from_leafwise(Leafwise(leaf=leaf, linear=lambda state, coefficients: optim.Linear(**numbers)))


def fused_with(change: Callable[..., Any]) -> Callable[..., None]:
    def fused(
        param: Tensor, update: Tensor, mu: Tensor, nu: Tensor, count: Tensor, linear: Any, **numbers: Any
    ) -> None:
        count, linear, numbers = change(count, linear, numbers)
        fused_adam_(param, update, mu, nu, count, linear, **numbers)

    return fused


def check_fused(fused: Callable[..., None]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(9, generator=generator, dtype=torch.float64) for _ in range(4)]
    numbers = {"b1": 0.4, "b2": 0.5, "eps": 1e-2}
    for linear in (optim.Linear(-0.5, -0.25), optim.Linear(0.0, -0.25), optim.Linear(-0.5)):
        arithmetic.check_fused(fused, tensors, torch.tensor(2.0), linear, numbers)


def check_norm(norm: Callable[[Any], float]) -> None:
    arithmetic.check_norm(norm, [torch.full((1500,), 1.0), torch.full((3,), 1e-25)])
    arithmetic.check_norm(norm, [torch.full((1500,), 1e-25)])
    arithmetic.check_norm(norm, [torch.full((1500,), 1e20)])


def zeros(path: str, param: Tensor) -> Tensor:
    return torch.zeros_like(param)


def clip_stages(clip: Callable[[float], Transformation]) -> None:
    cases.check_clip_over_stages(lambda: optim.chain(clip(1.0), optim.sgd(1.0)), torch.float32)


WRONG: dict[str, Callable[[], None]] = {
    "count incremented before use": lambda: cases.check_rates(count_incremented_before_use),
    "decay on every call": lambda: cases.check_accumulation(decay_on_every_call),
    "positive zero between updates": lambda: cases.check_accumulation(positive_zero_between_updates),
    "an Adam step at every call": lambda: cases.check_accumulation(adam_at_every_call),
    "norm of a leaf": lambda: cases.check_clip(clip_by_leaf_norm),
    "norm of a stage": lambda: clip_stages(clip_by_leaf_norm),
    "clipped up": lambda: cases.check_clip(clip_up),
    "clipped with epsilon": lambda: cases.check_clip(clip_with_epsilon),
    "squares in float32": lambda: cases.check_clip(clip_in_float32),
    "eps inside the root": lambda: against_torch.check_equals_torch(adam_with(eps_inside_root), torch_adam),
    "nu not corrected": lambda: against_torch.check_equals_torch(adam_with(no_correction_of_nu), torch_adam),
    "moments in 16 bit": lambda: cases.check_state_dtypes(
        adam_with(right_direction, torch.bfloat16), torch.bfloat16, torch.float32
    ),
    "decay through the moments": lambda: against_torch.check_equals_torch(
        optim.chain(optim.add_decayed_weights(0.3), optim.adam(0.02)), torch_adamw
    ),
    "decay after the rate": lambda: against_torch.check_equals_torch(
        optim.chain(optim.adam(0.02), optim.add_decayed_weights(0.3)), torch_adamw
    ),
    "leaf overwrites its state": lambda: check_bits(from_leafwise(Leafwise(overwrites_its_state, init_leaf=zeros))),
    "leaf overwrites its update": lambda: check_bits(from_leafwise(Leafwise(overwrites_its_update))),
    "not elementwise, but says so": lambda: check_bits(from_leafwise(Leafwise(says_elementwise))),
    "step in one forgets what follows": lambda: check_bits(
        optim.chain(overwrite(forgets_what_follows), optim.scale(0.5))
    ),
    "step in one writes over the update": lambda: check_bits(overwrite(writes_over_the_update)),
    "step in one keeps its moments": lambda: check_bits(overwrite(keeps_its_moments)),
    "step in one sees whole leaves": lambda: check_bits(overwrite(treats_a_block_as_a_whole)),
    "linear in word, with another scale": lambda: equal_bits.check_linear(linear_that_is_not(scale=0.25)),
    "linear in word, with a share": lambda: equal_bits.check_linear(linear_that_is_not(scale=0.5, share=0.1)),
    "fused, a step late": lambda: check_fused(fused_with(lambda count, linear, n: (count + 1, linear, n))),
    "fused, without decay": lambda: check_fused(
        fused_with(lambda count, linear, n: (count, linear._replace(share=0.0), n))
    ),
    "fused, without eps": lambda: check_fused(fused_with(lambda count, linear, n: (count, linear, {**n, "eps": 0.0}))),
    "norm in float32": lambda: check_norm(lambda leaves: float(torch.cat(leaves).norm())),
    "norm of whole runs only": lambda: check_norm(lambda leaves: optim.global_norm([leaves[0][:1024], *leaves[1:]])),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_optimizer_is_noticed(name: str) -> None:
    with pytest.raises(AssertionError):
        WRONG[name]()


def test_the_framework_of_the_wrong_ones_is_right() -> None:
    against_torch.check_equals_torch(adam_with(right_direction), torch_adam)
    cases.check_clip(lambda limit: clip_by_factor(lambda norm: min(limit / norm, 1.0) if norm else 1.0))
    check_bits(from_leafwise(Leafwise(lambda path, update, state, param, coefficients: (update, state))))
    check_bits(adam_that())
    check_bits(overwrite(lambda *arguments: arguments))
    equal_bits.check_linear(linear_that_is_not(scale=0.5))
    check_fused(fused_adam_)
    check_norm(optim.global_norm)
