"""Gradient accumulation: one update from the mean of several calls' gradients.

Source: own, with the meaning of optax's MultiSteps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.optim.base import Transformation, from_leafwise
from rpfunc.optim.checks import check_number
from rpfunc.optim.leafwise import Leafwise
from rpfunc.optim.rows import check_params, check_updates, working_dtype
from rpfunc.tree import Tree


class AccumulateShared(NamedTuple):
    """Calls since the last update, and updates so far, both 0-d int64; and what `inner` shares."""

    micro_count: Tensor
    update_count: Tensor
    inner: Any


class AccumulateLeaf(NamedTuple):
    """The sum of a leaf's updates since the last emission, in its working dtype; and `inner`'s state of the leaf."""

    total: Tensor
    inner: Any


class AccumulateState(NamedTuple):
    """As the two above, for an `inner` that needs whole trees: `total` is a tree like the parameters."""

    micro_count: Tensor
    update_count: Tensor
    total: Tree
    inner: Any


def accumulate(inner: Transformation, every: int | Callable[[int], int]) -> Transformation:
    """Returns the transformation that hands `inner` the mean of `every` calls' updates, at the last of them.

    At the others the state of `inner` rests, and updates are -0.0, which adding changes no bit of any parameter.
    For that, put it outermost: a chain that goes on after it, say with weight decay, would act at every call.
    Each call counts alike, whatever number of tokens it saw; a non-finite update spoils the mean it is part of.

    every: calls to an update, or a schedule of it by the number of updates so far.
    Raises OptimizerError if `every` is less than 1; for a schedule, at the call that reads it.
    """
    if not callable(every):
        _check_every("every", every)

    def is_last(micro_count: Tensor, update_count: Tensor) -> bool:
        count = int(update_count)
        needed = every(count) if callable(every) else every
        _check_every(f"every at update {count}", needed)
        return int(micro_count) + 1 >= needed

    if inner.leafwise is None:
        return _accumulate_trees(inner, is_last)
    return from_leafwise(_accumulate_leafwise(inner.leafwise, is_last))


def _accumulate_leafwise(inner: Leafwise, is_last: Callable[[Tensor, Tensor], bool]) -> Leafwise:
    def init_leaf(path: str, param: Tensor) -> AccumulateLeaf:
        return AccumulateLeaf(_zeros(param), inner.init_leaf(path, param))

    def init_shared() -> AccumulateShared:
        return AccumulateShared(_zero(), _zero(), inner.init_shared())

    def reduce(path: str, update: Tensor, state: AccumulateLeaf, shared: AccumulateShared) -> float:
        # What inner reduces over is the mean, which is as cheap to find again as to keep.
        if inner.reduce is None or not is_last(shared.micro_count, shared.update_count):
            return 0.0
        return inner.reduce(path, (state.total + update) / (int(shared.micro_count) + 1), state.inner, shared.inner)

    def scalars(shared: AccumulateShared, total: float | None) -> tuple[Any, AccumulateShared]:
        micro_count, update_count, inner_shared = shared
        if not is_last(micro_count, update_count):
            return None, AccumulateShared(micro_count + 1, update_count, inner_shared)
        coefficients, inner_shared = inner.scalars(inner_shared, total)
        return (int(micro_count) + 1, coefficients), AccumulateShared(_zero(), update_count + 1, inner_shared)

    def leaf(
        path: str, update: Tensor, state: AccumulateLeaf, param: Tensor, coefficients: Any
    ) -> tuple[Tensor, AccumulateLeaf]:
        total = state.total + update
        if coefficients is None:
            return torch.full_like(total, -0.0), AccumulateLeaf(total, state.inner)
        calls, inner_coefficients = coefficients
        update, inner_state = inner.leaf(path, total / calls, state.inner, param, inner_coefficients)
        return update, AccumulateLeaf(torch.zeros_like(total), inner_state)

    return Leafwise(
        leaf=leaf,
        init_leaf=init_leaf,
        init_shared=init_shared,
        scalars=scalars,
        reduce=None if inner.reduce is None else reduce,
        elementwise=inner.elementwise,
    )


def _accumulate_trees(inner: Transformation, is_last: Callable[[Tensor, Tensor], bool]) -> Transformation:
    def init(params: Tree) -> AccumulateState:
        check_params(params)
        return AccumulateState(_zero(), _zero(), tree.map(_zeros, params), inner.init(params))

    def update(updates: Tree, state: AccumulateState, params: Tree) -> tuple[Tree, AccumulateState]:
        check_updates(updates, params)
        calls = state.micro_count + 1
        total = tree.map(lambda past, new: past + new.to(past.dtype), state.total, updates)
        if not is_last(state.micro_count, state.update_count):
            nothing = tree.map(lambda leaf: torch.full_like(leaf, -0.0), total)
            return nothing, state._replace(micro_count=calls, total=total)
        mean = tree.map(lambda leaf: leaf / int(calls), total)
        updates, inner_state = inner.update(mean, state.inner, params)
        return updates, AccumulateState(_zero(), state.update_count + 1, tree.zeros_like(total), inner_state)

    return Transformation(init, update)


def _check_every(name: str, every: int) -> None:
    check_number(name, every, "at least 1", lambda value: value >= 1, 4)


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _zeros(param: Tensor) -> Tensor:
    return torch.zeros(param.shape, dtype=working_dtype(param), device=param.device)
