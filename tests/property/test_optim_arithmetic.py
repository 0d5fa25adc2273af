"""The arithmetic below the transformations: linear maps, Adam's kernel, the norm. Oracles are written in float64."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import inf, isinf, isnan, sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rpfunc import optim, tree
from rpfunc.optim import Linear
from rpfunc.optim.fused import fused_adam_

# Linear maps

small = st.integers(-4, 4).map(float)
linears = st.builds(Linear, small, small)


@given(linears, linears, linears, small, small)
def test_linear_maps_compose(first: Linear, second: Linear, third: Linear, update: float, param: float) -> None:
    # All values are small integers, so float64 is exact.
    u, p = torch.tensor(update, dtype=torch.float64), torch.tensor(param, dtype=torch.float64)
    value = first.scale * update + first.share * param
    assert first(u, p).item() == value
    value = second.scale * value + second.share * param
    assert first.then(second)(u, p).item() == second(first(u, p), p).item() == value
    assert first.then(second).then(third) == first.then(second.then(third))
    assert first.then(Linear()) == Linear().then(first) == first

    out = torch.full((), 7.0, dtype=torch.float64)
    assert first(u, p, out=out).item() == first(u, p).item()
    target = p.clone()
    first.add_(target, u)
    assert target.item() == param + first(u, p).item()


def test_a_linear_map_without_a_share_does_not_look_at_the_parameter() -> None:
    update, param = torch.tensor([-0.0, 2.0]), torch.tensor([inf, -inf])
    assert Linear()(update, param) is update
    assert Linear(2.0)(update, param).tolist() == [-0.0, 4.0]
    assert str(Linear(2.0)(update, param)[0].item()) == "-0.0"
    assert Linear(2.0).then(Linear(inf)) == Linear(inf)  # not inf 0, which is not a number
    assert Linear().then(Linear(share=0.0)) == Linear()


# Adam's kernel


def adam(element: Any, count: int, linear: Linear, b1: float, b2: float, eps: float) -> Any:
    """One element, in Python's float64, as the paper has it."""
    param, update, mu, nu = element
    mu, nu = b1 * mu + (1 - b1) * update, b2 * nu + (1 - b2) * update * update
    direction = (mu / (1 - b1**count)) / (sqrt(nu / (1 - b2**count)) + eps)
    return param + linear.scale * direction + linear.share * param, mu, nu


@st.composite
def adam_problems(draw: st.DrawFn) -> tuple[list[Tensor], Tensor, Linear, dict[str, float]]:
    """(param, update, mu, nu), the count, what to add, and Adam's numbers."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    numel = draw(st.integers(0, 200))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    param, update, mu, nu = (torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4))
    linear = Linear(draw(st.sampled_from([0.0, -0.0, -1e-3, -0.5, 1.0])), draw(st.sampled_from([0.0, -1e-4, 0.25])))
    numbers = {
        "b1": draw(st.sampled_from([0.0, 0.4, 0.9])),
        "b2": draw(st.sampled_from([0.0, 0.5, 0.999])),
        "eps": draw(st.sampled_from([1e-8, 1e-2])),
    }
    count = torch.tensor(float(draw(st.sampled_from([1, 2, 3, 1000, 10**6]))))
    return [param, update, mu, nu.square()], count, linear, numbers


def check_fused(fused: Callable[..., None], tensors: list[Tensor], count: Tensor, linear: Linear, numbers: Any) -> None:
    elements = zip(*(tensor.tolist() for tensor in tensors), strict=True)
    expected = [adam(element, int(count), linear, **numbers) for element in elements]
    param, update, mu, nu = (tensor.clone() for tensor in tensors)
    fused(param, update, mu, nu, count, linear, **numbers)
    assert torch.equal(update, tensors[1])
    rtol, atol = (3e-5, 1e-6) if param.dtype == torch.float32 else (1e-12, 1e-14)
    for found, values in zip((param, mu, nu), zip(*expected, strict=True), strict=False):
        torch.testing.assert_close(found, torch.tensor(values, dtype=found.dtype), rtol=rtol, atol=atol)


@given(adam_problems())
def test_fused_adam_is_adam(problem: Any) -> None:
    check_fused(fused_adam_, *problem)


@given(adam_problems(), st.integers(1, 4), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_fused_adam_in_parts_and_in_other_layouts(problem: Any, units: int, dtype: torch.dtype) -> None:
    (param, *others), count, linear, numbers = problem
    param = param.to(dtype)
    whole = [tensor.clone() for tensor in (param, *others)]
    fuse = partial(fused_adam_, count=count, linear=linear, **numbers)
    fuse(*whole)

    parts = [tensor.clone() for tensor in (param, *others)]
    for part in zip(*(tensor.split(64 * units) for tensor in parts), strict=True):
        fuse(*part)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))

    columns = [torch.stack([tensor, tensor], dim=1)[:, 1] for tensor in (param, *others)]
    fuse(*columns)
    assert all(torch.equal(a, b) for a, b in zip(columns, whole, strict=True))


@pytest.fixture
def threads() -> Any:
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_number_of_threads_changes_no_bit(threads: Callable[[int], None]) -> None:
    generator = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(300_001, generator=generator), "b": torch.randn(1000, 77, generator=generator)}
    updates = {name: torch.randn(leaf.shape, generator=generator) for name, leaf in params.items()}
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, weight_decay=0.1))
    norms, steps = set(), []
    for number in (1, 2, 3, 7):
        threads(number)
        norms.add(tuple(optim.global_norm([leaf * size for leaf in updates.values()]) for size in (1e-25, 1.0, 1e25)))
        steps.append(tree.leaves(optim.step(optimizer, updates, optimizer.init(params), params)))
    assert len(norms) == 1
    assert all(torch.equal(left, right) for step in steps for left, right in zip(step, steps[0], strict=True))


# The norm


def check_norm(norm: Callable[[Any], float], leaves: list[Tensor]) -> None:
    exact = sum((Fraction(value) ** 2 for leaf in leaves for value in leaf.double().tolist()), Fraction())
    # The root of a fraction as far from 1 as these, without leaving float64: scale by powers of 4.
    shift = (exact.numerator.bit_length() - exact.denominator.bit_length()) // 2 if exact else 0
    expected = sqrt(exact / Fraction(4) ** shift) * 2.0**shift
    assert norm(leaves) == pytest.approx(expected, rel=1e-6)


@st.composite
def leaves_of_any_magnitude(draw: st.DrawFn) -> list[Tensor]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    leaves = []
    for _ in range(draw(st.integers(1, 3))):
        numel = draw(st.sampled_from([0, 1, 5, 1023, 1024, 1025, 3000]))
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
        magnitude = 10.0 ** draw(st.sampled_from([-38, -25, -22, -20, -13, -12, -3, 0, 10, 18, 19, 20, 37]))
        leaves.append((torch.randn(numel, generator=generator, dtype=torch.float64) * magnitude).to(dtype))
    return leaves


@settings(max_examples=40)
@given(leaves_of_any_magnitude())
def test_the_norm_is_right_at_any_magnitude(leaves: list[Tensor]) -> None:
    check_norm(optim.global_norm, leaves)


@given(st.sampled_from([inf, -inf, float("nan")]), st.sampled_from([1, 1024, 1500]), st.data())
def test_the_norm_says_what_is_not_finite(bad: float, numel: int, data: st.DataObject) -> None:
    leaf = torch.ones(numel)
    leaf[data.draw(st.integers(0, numel - 1))] = bad
    norm = optim.global_norm([torch.ones(3), leaf])
    assert isnan(norm) if isnan(bad) else isinf(norm)
