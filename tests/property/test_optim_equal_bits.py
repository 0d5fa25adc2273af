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


def zeros(path: str, param: Tensor) -> Tensor:
    return torch.zeros(param.shape, dtype=torch.promote_types(param.dtype, torch.float32))


def delayed() -> Transformation:
    """One step late: its new update is its old state, which a careless donation overwrites before it is read."""
    leaf = lambda path, update, pending, param, coefficients: (pending, update)  # noqa: E731
    return optim.from_leafwise(optim.Leafwise(leaf=leaf, init_leaf=zeros))


def previous() -> Transformation:
    """Its state is the last parameter, which a careless step overwrites before it is kept; its update, half of it."""
    leaf = lambda path, update, last, param, coefficients: (0.5 * last, param.to(last.dtype))  # noqa: E731
    return optim.from_leafwise(optim.Leafwise(leaf=leaf, init_leaf=zeros))


def parameter() -> Transformation:
    """The parameter itself as the update, so that who overwrites the one overwrites the other."""
    leaf = lambda path, update, state, param, coefficients: (param.to(update.dtype), state)  # noqa: E731
    return optim.from_leafwise(optim.Leafwise(leaf=leaf))


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
    "previous": previous(),
    "parameter": parameter(),
    "adamw": optim.adamw(optim.linear(0.1, 0.0, 2), weight_decay=0.3, mask=lambda path, leaf: "b" not in path),
    "sgd": optim.sgd(0.1, momentum=0.5, weight_decay=0.3),
    "masked adamw": optim.masked(optim.chain(optim.scale(-1.0), optim.adamw(0.1)), lambda path, leaf: "a" in path),
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
    sizes = st.one_of(st.lists(st.integers(0, 9), max_size=3), st.lists(st.integers(60, 200), min_size=1, max_size=1))
    shapes = [tuple(each) for each in draw(st.lists(sizes, min_size=1, max_size=4))]

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


def check_update(optimizer: Transformation, gradients: Any, state: Any, params: Any, stepped: Any) -> None:
    """The update alone overwrites nothing, and applied it is the step but for rounding."""
    before = bits((gradients, state, params))
    updates, next_state = optimizer.update(gradients, state, params)
    assert bits((gradients, state, params)) == before, "update overwrote what it was given"
    found = (optim.apply_updates(params, updates), next_state)
    for param, left, right in zip(tree.leaves((params, state)), tree.leaves(found), tree.leaves(stepped), strict=True):
        assert left.dtype == right.dtype
        largest = max([1.0, *(leaf.abs().nan_to_num().max().item() for leaf in (left, right) if leaf.numel())])
        rounding = 64 * torch.finfo(param.dtype).eps if param.is_floating_point() else 0.0
        torch.testing.assert_close(left, right, rtol=rounding, atol=rounding * largest, equal_nan=True)


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
        check_update(optimizer, step_gradients, pure_state, pure_params, (next_params, next_state))
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


@settings(max_examples=50, deadline=None)
@given(optimizers(), problems())
def test_the_layout_of_memory_changes_no_bit(optimizer: Transformation, problem: tuple[Any, list[Any]]) -> None:
    params, gradients = problem
    plain, state, plain_state = tree.map(Tensor.contiguous, params), optimizer.init(params), optimizer.init(params)
    for step_gradients in gradients:
        params, state = optim.step(optimizer, step_gradients, state, params)
        plain_gradients = tree.map(Tensor.contiguous, step_gradients)
        plain, plain_state = optim.step(optimizer, plain_gradients, plain_state, plain)
        assert bits((params, state)) == bits((plain, plain_state))


def check_linear(transformation: Transformation) -> None:
    """A link that says it is linear does the same in a chain, where it is only asked for its numbers, as alone."""
    params = {"a": torch.tensor([1.0, -2.0, 0.5]), "b": torch.tensor([[3.0]])}
    updates = tree.map(lambda leaf: 2 * leaf + 0.25, params)
    alone, chained = transformation, optim.chain(optim.identity(), transformation)
    found, _ = alone.update(updates, alone.init(params), params)
    expected, _ = chained.update(updates, chained.init(params), params)
    assert bits(found) == bits(expected)


def test_linear_links_do_what_they_say() -> None:
    linear = [link for link in LINKS.values() if link.leafwise is not None and link.leafwise.linear is not None]
    linear += [
        optim.scale(0.3),
        optim.sgd(0.1),
        optim.clip_by_global_norm(0.5),
        optim.masked(optim.scale(0.3), {"a": True, "b": False}),
    ]
    assert len(linear) >= 7
    for transformation in linear:
        check_linear(transformation)


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
