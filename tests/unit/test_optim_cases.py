"""Cases that have gone wrong in other optimizers, with the arithmetic worked out by hand.

Each `check_` takes the implementation to check, so that the tests in meta/ can show that it notices wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isinf, isnan, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from rpfunc import optim, tree
from rpfunc.optim import Transformation

STEPS = pytest.mark.parametrize("step", [optim.step, optim.step_donated], ids=["pure", "donated"])


def bits(values: Any) -> list[bytes]:
    return [
        leaf.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for leaf in map(torch.atleast_1d, tree.leaves(values))
    ]


def updates_of(transformation: Transformation, updates: Any, params: Any = None) -> Any:
    params = tree.zeros_like(updates) if params is None else params
    return transformation.update(updates, transformation.init(params), params)[0]


# Clipping


def check_clip(clip: Callable[[float], Transformation]) -> None:
    three_four = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([0.0, 4.0])}
    assert updates_of(clip(1.0), {}) == {}
    for limit in (0.0, 1.0):
        assert bits(updates_of(clip(limit), torch.zeros(3))) == bits(torch.zeros(3))
    for limit in (5.0, 10.0):
        assert bits(updates_of(clip(limit), three_four)) == bits(three_four)
    clipped = updates_of(clip(1.0), three_four)
    torch.testing.assert_close(clipped, {"a": torch.tensor([0.6, 0.0]), "b": torch.tensor([0.0, 0.8])})
    torch.testing.assert_close(updates_of(clip(1.0), torch.tensor([1e20])), torch.tensor([1.0]))
    assert bits(updates_of(clip(0.0), torch.ones(2))) == bits(torch.zeros(2))


def test_clip() -> None:
    check_clip(optim.clip_by_global_norm)


def test_clip_leaves_values_alone_when_the_norm_is_not_finite() -> None:
    for bad in (inf, -inf, nan):
        updates = {"bad": torch.tensor([bad, 1.0]), "good": torch.tensor([2.0, -0.0])}
        found = updates_of(optim.clip_by_global_norm(1.0), updates)
        assert bits(found) == bits(updates)
        norm = optim.global_norm(updates)
        assert isnan(norm) if isnan(bad) else isinf(norm)


def test_global_norm() -> None:
    assert optim.global_norm({}) == 0.0
    assert optim.global_norm({"empty": torch.zeros(0), "scalar": torch.tensor(-2.0)}) == 2.0
    assert optim.global_norm(torch.full((4,), 3e38)) == pytest.approx(6e38)
    assert optim.global_norm([torch.tensor(1e154, dtype=torch.float64)] * 4) == inf
    assert optim.global_norm(torch.full((2**16,), 1.0, dtype=torch.bfloat16)) == 256.0


def check_clip_over_stages(make: Callable[[], Transformation], dtype: torch.dtype) -> None:
    """Two stages' gradients (3, 0) and (0, 4), limit 1, rate 1, from zeros."""
    params = {"stage1": torch.zeros(2), "stage2": torch.zeros(2)}
    gradients = {"stage1": torch.tensor([3.0, 0.0], dtype=dtype), "stage2": torch.tensor([0.0, 4.0], dtype=dtype)}
    optimizer = make()
    leafwise, state = optimizer.leafwise, optimizer.init(params)
    assert leafwise is not None
    parts = {}
    for stage in ("stage2", "stage1"):  # as gradients arrive
        part = optim.LeafwiseState(state.shared, {stage: state.leaves[stage]})
        parts[stage] = optim.measure(leafwise, {stage: gradients[stage]}, part, {stage: params[stage]})
    assert sum(sum(part) for part in parts.values()) == 25.0
    coefficients, _ = optim.prepare(leafwise, parts["stage2"] + parts["stage1"], state.shared)
    for stage, expected in {"stage1": [-0.6, 0.0], "stage2": [0.0, -0.8]}.items():
        gradient, leaves, param = ({stage: values[stage]} for values in (gradients, state.leaves, params))
        updates, _ = optim.advance(leafwise, gradient, leaves, param, coefficients)
        torch.testing.assert_close(updates[stage], torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clip_over_stages(dtype: torch.dtype) -> None:
    check_clip_over_stages(lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1.0)), dtype)


# Schedules


def check_rates(sgd: Callable[[optim.Schedule], Transformation]) -> None:
    schedule = optim.join([optim.linear(0.0, 1.0, 4), optim.constant(1.0)], [4])
    optimizer, params = sgd(schedule), torch.zeros(())
    state, rates = optimizer.init(params), []
    for _ in range(6):
        updates, state = optimizer.update(torch.ones(()), state, params)
        rates.append(-updates.item())
    assert rates == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_rates() -> None:
    check_rates(optim.sgd)
    check_rates(lambda schedule: optim.chain(optim.scale_by_schedule(schedule), optim.scale(-1.0)))
    check_rates(lambda schedule: optim.accumulate(optim.sgd(schedule), every=1))


def test_second_schedule_starts_at_its_own_zero() -> None:
    joined = optim.join([optim.constant(7.0), lambda count: float(count), optim.constant(9.0)], [3, 5])
    assert [joined(count) for count in range(7)] == [7.0, 7.0, 7.0, 0.0, 1.0, 9.0, 9.0]


def test_warmup_may_be_empty_and_the_peak_zero() -> None:
    assert optim.warmup_cosine(5.0, 1.0, 0, 2)(0) == 1.0
    assert optim.warmup_cosine(0.0, 0.0, 1, 2, end_value=0.5)(9) == 0.5


# Accumulation


def check_accumulation(adamw: Callable[[], Transformation]) -> None:
    """p = 1, rate 0.01, decay 0.1, every 4, gradients 1: one Adam step of 0.01 and one decay of 0.001."""
    optimizer = adamw()
    params = {"p": torch.tensor([1.0, -0.0])}
    start, state = bits(params), optimizer.init(params)
    for _ in range(3):
        params, state = optim.step(optimizer, {"p": torch.ones(2)}, state, params)
        assert bits(params) == start
    params, state = optim.step(optimizer, {"p": torch.ones(2)}, state, params)
    torch.testing.assert_close(params["p"], torch.tensor([0.989, -0.01]), rtol=1e-6, atol=0)


def test_accumulation() -> None:
    check_accumulation(lambda: optim.accumulate(optim.adamw(0.01, weight_decay=0.1), every=4))


def test_accumulation_advances_schedules_by_updates() -> None:
    counts: list[int] = []

    def schedule(count: int) -> float:
        counts.append(count)
        return 0.5

    optimizer = optim.accumulate(optim.sgd(schedule), every=lambda updates: updates + 1)
    params = torch.zeros(())
    state, history = optimizer.init(params), []
    for gradient in (1.0, 1.0, 3.0, 1.0, 2.0, 6.0):
        params, state = optim.step(optimizer, torch.tensor(gradient), state, params)
        history.append(params.item())
    assert history == [-0.5, -0.5, -1.5, -1.5, -1.5, -3.0]
    assert counts == [0, 1, 2]


@STEPS
def test_accumulation_clips_the_mean_whether_leafwise_or_not(step: Callable[..., Any]) -> None:
    # The chain that clips second is not leafwise; with no momentum to speak of, it must agree with the other.
    clip = optim.clip_by_global_norm(1.0)
    first = optim.accumulate(optim.chain(clip, optim.sgd(1.0)), every=2)
    second = optim.accumulate(optim.chain(optim.identity(), clip, optim.sgd(1.0)), every=2)
    assert first.leafwise is not None
    assert second.leafwise is None
    for optimizer in (first, second):
        params = {"a": torch.tensor([-0.0]), "b": torch.tensor([-0.0])}
        state = optimizer.init(params)
        params, state = step(optimizer, {"a": torch.tensor([6.0]), "b": torch.tensor([0.0])}, state, params)
        assert bits(params) == bits({"a": torch.tensor([-0.0]), "b": torch.tensor([-0.0])})
        params, state = step(optimizer, {"a": torch.tensor([0.0]), "b": torch.tensor([8.0])}, state, params)
        torch.testing.assert_close(params, {"a": torch.tensor([-0.6]), "b": torch.tensor([-0.8])})


# Precision


def check_state_dtypes(optimizer: Transformation, dtype: torch.dtype, expected: torch.dtype) -> None:
    params = {"w": torch.ones(3, dtype=dtype)}
    state = optimizer.init(params)
    for _ in range(5):
        assert {leaf.dtype for leaf in tree.leaves(state)} == {expected, torch.int64}
        params, state = optim.step(optimizer, {"w": torch.ones(3, dtype=dtype)}, state, params)
        assert params["w"].dtype == dtype


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_state_dtypes(dtype: torch.dtype, expected: torch.dtype) -> None:
    optimizer = optim.adamw(optim.constant(0.1))
    check_state_dtypes(optimizer, dtype, expected)
    check_state_dtypes(optim.accumulate(optimizer, 3), dtype, expected)
    check_state_dtypes(optim.chain(optim.trace(0.9), optim.scale_by_schedule(optim.constant(1.0))), dtype, expected)


def test_small_bfloat16_gradients_are_not_lost() -> None:
    # A bfloat16 sum would stay at 1: the gap to the next number above it is 0.0078125.
    optimizer = optim.accumulate(optim.identity(), every=257)
    params = torch.zeros((), dtype=torch.bfloat16)
    state = optimizer.init(params)
    for gradient in [1.0] + [0.001] * 256:
        updates, state = optimizer.update(torch.tensor(gradient, dtype=torch.bfloat16), state, params)
    small = torch.tensor(0.001, dtype=torch.bfloat16).item()
    assert updates.item() * 257 == pytest.approx(1 + 256 * small, rel=1e-6)
    assert updates.item() * 257 == pytest.approx(1.255859, rel=1e-3)


def test_float32_master_parameter_moves_where_a_bfloat16_one_cannot() -> None:
    optimizer = optim.sgd(1e-4)
    for dtype, expected in [(torch.float32, 0.98828125), (torch.bfloat16, 1.0)]:
        params = torch.ones((), dtype=dtype)
        state = optimizer.init(params)
        for _ in range(100):
            params, state = optim.step(optimizer, torch.ones((), dtype=torch.bfloat16), state, params)
        assert params.bfloat16().item() == expected


# Masks

PARAMS = {"block": {"bias": torch.ones(2), "weight": torch.ones(2, 2)}, "head": [torch.ones(2)]}


@pytest.mark.parametrize(
    ("mask", "selected"),
    [
        ({"block": {"bias": False, "weight": True}, "head": [True]}, {"block.weight", "head.0"}),
        ({"block": True, "head": False}, {"block.bias", "block.weight"}),
        (True, {"block.bias", "block.weight", "head.0"}),
        (lambda path, leaf: leaf.ndim >= 2, {"block.weight"}),
        (lambda path, leaf: path.startswith("head"), {"head.0"}),
    ],
    ids=["tree", "prefix", "root", "by leaf", "by path"],
)
@pytest.mark.parametrize("leafwise", [True, False])
@STEPS
def test_masked(mask: Any, selected: set[str], leafwise: bool, step: Callable[..., Any]) -> None:
    inner = optim.sgd(0.5)
    if not leafwise:
        inner = Transformation(inner.init, inner.update)
    optimizer = optim.masked(inner, mask)
    assert (optimizer.leafwise is not None) == leafwise
    params = tree.map(torch.clone, PARAMS)
    params, _ = step(optimizer, tree.map(torch.ones_like, PARAMS), optimizer.init(params), params)
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        assert leaf.unique().tolist() == [0.5 if path in selected else 2.0]


def test_masked_clip_measures_selected_leaves_only() -> None:
    optimizer = optim.masked(optim.clip_by_global_norm(1.0), {"a": True, "b": False})
    updates = {"a": torch.tensor([2.0]), "b": torch.tensor([100.0])}
    assert updates_of(optimizer, updates) == {"a": torch.tensor([1.0]), "b": torch.tensor([100.0])}


# Autograd


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, on the way to dual numbers
def test_a_step_is_differentiable() -> None:
    optimizer = optim.chain(optim.clip_by_global_norm(100.0), optim.adamw(0.1, eps=1e-2), optim.scale(2.0))
    params = torch.tensor([1.0, -2.0], dtype=torch.float64)
    state = optimizer.init(params)

    def function(gradient: Tensor) -> Tensor:
        first, after = optim.step(optimizer, gradient, state, params)
        last: Tensor = optim.step(optimizer, gradient * first, after, first)[0]
        return last

    point = torch.tensor([0.5, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, point, check_forward_ad=True)
    assert torch.allclose(function(point.detach()), function(point).detach())
