"""One set of bits: pure or donated, whole or by subtree, in blocks of any size, contiguous or not."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rpfunc import optim, tree
from rpfunc.optim import Transformation

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NUM_STEPS = 3


def delayed() -> Transformation:
    """One step late: its new update is its old state, which a careless donation overwrites before it is read."""
    leaf = lambda path, update, pending, param, coefficients: (pending, update)  # noqa: E731
    init = lambda path, param: torch.zeros(param.shape, dtype=torch.promote_types(param.dtype, torch.float32))  # noqa: E731
    return optim.from_leafwise(optim.Leafwise(leaf=leaf, init_leaf=init))


def centered() -> Transformation:
    """Updates less their mean: leafwise, but not elementwise."""
    leaf = lambda path, update, state, param, coefficients: (update - update.sum() / max(update.numel(), 1), state)  # noqa: E731
    return optim.from_leafwise(optim.Leafwise(leaf=leaf, elementwise=False))


LINKS = {
    "identity": optim.identity(),
    "trace": optim.trace(0.9, nesterov=True),
    "adam": optim.scale_by_adam(b1=0.8, b2=0.9),
    "decay": optim.add_decayed_weights(0.1, mask=lambda path, leaf: leaf.ndim >= 1),
    "schedule": optim.scale_by_schedule(optim.linear(1.0, 0.0, 3)),
    "masked": optim.masked(optim.sgd(0.5, momentum=0.5), lambda path, leaf: "a" in path),
    "delayed": delayed(),
    "centered": centered(),
    "accumulate": optim.accumulate(optim.adamw(0.1), every=2),
    "accumulate clipped": optim.accumulate(optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1)), every=2),
}


@st.composite
def optimizers(draw: st.DrawFn) -> Transformation:
    links = [LINKS[name] for name in draw(st.lists(st.sampled_from(sorted(LINKS)), max_size=3))]
    where = draw(st.sampled_from(["no clipping", "first", "last"]))
    clip = [optim.clip_by_global_norm(draw(st.sampled_from([0.0, 0.5, 1e3])))]
    links = clip + links if where == "first" else links + clip if where == "last" else links
    return optim.chain(*links)


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Params of one to four subtrees, and gradients for each step, in various dtypes and layouts."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4))

    def tensor(shape: tuple[int, ...], dtype: torch.dtype, transposed: bool) -> Tensor:
        values = torch.randn(tuple(reversed(shape)) if transposed else shape, generator=generator).to(dtype)
        values = torch.where(values.abs() < 0.2, torch.full_like(values, -0.0), values)
        return values.permute(tuple(reversed(range(values.ndim)))) if transposed else values

    params: dict[str, Any] = {}
    gradients: list[dict[str, Any]] = [{} for _ in range(NUM_STEPS)]
    for name, shape in zip("abcd", shapes, strict=False):
        dtype, transposed = draw(st.sampled_from(DTYPES)), draw(st.booleans())
        gradient_dtype, gradient_transposed = draw(st.sampled_from([dtype, torch.float32])), draw(st.booleans())
        params[name] = {"w": [tensor(shape, dtype, transposed)]}
        for step in gradients:
            step[name] = {"w": [tensor(shape, gradient_dtype, gradient_transposed)]}
    return params, gradients


def bits(values: Any) -> list[tuple[str, torch.dtype, bytes]]:
    def raw(leaf: Tensor) -> bytes:
        return leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return [(path, leaf.dtype, raw(leaf)) for path, leaf in zip(tree.paths(values), tree.leaves(values), strict=True)]


def by_subtree(
    optimizer: Transformation, gradients: Any, state: Any, params: Any, names: list[str], block_numel: int
) -> Any:
    """Takes one donated step as a pipeline does: each subtree for itself, in the given order, twice."""
    leafwise = optimizer.leafwise
    assert leafwise is not None
    parts: list[float] = []
    for name in names:
        part = optim.LeafwiseState(state.shared, {name: state.leaves[name]})
        parts += optim.measure(leafwise, {name: gradients[name]}, part, {name: params[name]})
    coefficients, shared = optim.prepare(leafwise, parts, state.shared)
    for name in reversed(names):
        gradient, leaves, param = ({name: values[name]} for values in (gradients, state.leaves, params))
        optim.advance_donated(leafwise, gradient, leaves, param, coefficients, block_numel=block_numel)
    return params, optim.LeafwiseState(shared, state.leaves)


def check_equal_bits(
    optimizer: Transformation, params: Any, gradients: list[Any], block_numel: int, order: list[str]
) -> None:
    pure_params, pure_state = params, optimizer.init(params)
    donated_params = tree.map(torch.clone, params)
    donated_state = optimizer.init(params)
    split_params = tree.map(torch.clone, params)
    split_state = optimizer.init(params)
    for step_gradients in gradients:
        gradient_bits = bits(step_gradients)
        before = bits((step_gradients, pure_state, pure_params))
        next_params, next_state = optim.step(optimizer, step_gradients, pure_state, pure_params)
        assert bits((step_gradients, pure_state, pure_params)) == before, "step overwrote what it was given"
        pure_params, pure_state = next_params, next_state
        expected = bits((pure_params, pure_state))

        storage = [leaf.data_ptr() for leaf in tree.leaves((donated_params, donated_state))]
        donated_params, donated_state = optim.step_donated(
            optimizer, step_gradients, donated_state, donated_params, block_numel=block_numel
        )
        assert [leaf.data_ptr() for leaf in tree.leaves((donated_params, donated_state))] == storage
        assert bits((donated_params, donated_state)) == expected
        assert bits(step_gradients) == gradient_bits, "updates are only read"

        if optimizer.leafwise is not None:
            split_params, split_state = by_subtree(
                optimizer, step_gradients, split_state, split_params, order, block_numel
            )
            assert bits((split_params, split_state)) == expected


@settings(max_examples=150, deadline=None)
@given(optimizers(), problems(), st.sampled_from([1, 3, 8, 17, 64, 2**18]), st.randoms(use_true_random=False))
def test_equal_bits(optimizer: Transformation, problem: tuple[Any, list[Any]], block_numel: int, random: Any) -> None:
    params, gradients = problem
    order = sorted(params)
    random.shuffle(order)
    check_equal_bits(optimizer, params, gradients, block_numel, order)


def test_equal_bits_in_leaves_of_several_blocks() -> None:
    # Beyond torch's grain of 32768 elements, a call is shared by threads that begin at odd places.
    generator = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(3 * 2**17 + 5, generator=generator), "b": torch.randn(40_001, generator=generator)}
    gradients = [tree.map(lambda leaf: torch.randn(leaf.shape, generator=generator), params) for _ in range(2)]
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, weight_decay=0.1))
    for block_numel in (10_007, 2**17, 2**18):
        check_equal_bits(optimizer, params, gradients, block_numel, ["b", "a"])


@settings(max_examples=50, deadline=None)
@given(problems(), st.floats(0.0, 10.0))
def test_clipped_norm_is_at_most_the_limit(problem: tuple[Any, list[Any]], max_norm: float) -> None:
    params, (updates, *_) = problem
    transformation = optim.clip_by_global_norm(max_norm)
    clipped, _ = transformation.update(updates, transformation.init(params), params)
    norm = optim.global_norm(updates)
    assert optim.global_norm(clipped) <= min(norm, max_norm) * (1 + 1e-5) + 1e-30
    if norm <= max_norm:
        assert tree.leaves(tree.map(lambda old, new: torch.equal(old.to(new.dtype), new), updates, clipped)) == [
            True
        ] * len(tree.leaves(updates))


@settings(max_examples=50, deadline=None)
@given(problems(), st.integers(1, 4))
def test_accumulated_steps_equal_one_step_on_the_mean(problem: tuple[Any, list[Any]], every: int) -> None:
    params, gradients = problem
    params = tree.map(lambda leaf: leaf.double(), params)
    micro = [tree.map(lambda leaf: leaf.double(), gradients[index % NUM_STEPS]) for index in range(every)]
    inner = optim.adamw(0.1, weight_decay=0.1)
    optimizer = optim.accumulate(inner, every)
    state, found = optimizer.init(params), params
    for gradient in micro:
        found, state = optim.step(optimizer, gradient, state, found)
    mean = tree.map(lambda *leaves: torch.stack(leaves).sum(0) / every, *micro)
    expected, _ = optim.step(inner, mean, inner.init(params), params)
    for left, right in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
