"""Steps: updates made and applied. A donated step writes over what it is given; a pure one gives it copies.

The parameters and state that are given up are overwritten leaf by leaf, in blocks: no temporary as large as a leaf
exists, and the work stays in the cache. The bits do not depend on it, since an elementwise function cannot tell a
block from a leaf.

Source: own; 'donation' is JAX's word for giving up a buffer to a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rpfunc import tree
from rpfunc.errors import OptimizerError
from rpfunc.optim.base import Transformation, apply_updates, check_leafwise_state
from rpfunc.optim.donatable import check_donatable
from rpfunc.optim.leafwise import Leafwise, LeafwiseState, measure, prepare
from rpfunc.optim.linear import Linear
from rpfunc.optim.rows import BLOCK_NUMEL, Row, blocks, check_params, check_updates, contiguous, rows, widened
from rpfunc.tree import Tree


def step(transformation: Transformation, updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
    """Returns the next params and state: one update, applied. Overwrites nothing; see `step_donated`.

    `update` and then `apply_updates` give the same but for rounding: a step may do both in one operation. Where a
    derivative is being taken, they are what is done.
    """
    leafwise = transformation.leafwise
    if leafwise is None or _differentiated((updates, state, params)):
        updates, state, params = tree.map(_contiguous, (updates, state, params))
        updates, state = transformation.update(updates, state, params)
        return apply_updates(params, updates), state
    check_leafwise_state(state)
    check_params(params)
    check_updates(updates, params)
    coefficients, shared = prepare(leafwise, measure(leafwise, updates, state, params), state.shared)
    params, leaves = tree.map(torch.clone, (params, state.leaves))
    advance_donated(leafwise, updates, leaves, params, coefficients)
    return params, LeafwiseState(shared, leaves)


def step_donated(
    transformation: Transformation, updates: Tree, state: Any, params: Tree, *, block_numel: int = BLOCK_NUMEL
) -> tuple[Tree, Any]:
    """Returns the next params and state, bit for bit those of `step`, in the storage of the present ones.

    Use only what is returned: `params` and `state` have been given up. `updates` are only read.
    Memory: blocks of `block_numel` elements, rounded up to a multiple of 64, if the transformation is elementwise;
    else temporaries as large as a leaf.
    Raises OptimizerError, before anything is written, if the trees do not match or `check_donatable` objects.
    """
    check_donatable(updates, state, params)
    leafwise = transformation.leafwise
    with torch.no_grad():
        if leafwise is None:
            results = step(transformation, updates, state, params)
            problems = tree.mismatches(results, (params, state))
            if problems:
                raise OptimizerError.listing("results do not fit the storage to take over", problems)
            _overwrite(tree.leaves((params, state)), tree.leaves(results))
        else:
            check_leafwise_state(state)
            coefficients, shared = prepare(leafwise, measure(leafwise, updates, state, params), state.shared)
            advance_donated(leafwise, updates, state.leaves, params, coefficients, block_numel=block_numel)
            _overwrite(tree.leaves(state.shared), tree.leaves(shared))
    return params, state


def advance_donated(
    leafwise: Leafwise, updates: Tree, leaves: Tree, params: Tree, coefficients: Any, *, block_numel: int = BLOCK_NUMEL
) -> None:
    """Overwrites params and leaf states, of a whole tree or any part of it, by the next ones.

    As `advance`, and the updates are applied, as in `step`. It does not ask `check_donatable`: the caller has, once,
    for all parts.
    """
    with torch.no_grad():
        scratch = torch.empty(0)
        for row in rows(updates, leaves, params):
            place = contiguous(row)
            for piece in map(widened, blocks(place, block_numel) if leafwise.elementwise else [place]):
                if leafwise.overwrite is None:
                    _replace(leafwise, piece, coefficients)
                else:
                    # One for all blocks: memory that was just allocated is slow to touch.
                    scratch = _at_least(scratch, piece.update)
                    part = scratch[: piece.update.numel()].view_as(piece.update)
                    leafwise.overwrite(*piece, coefficients, Linear(), part)
            if place is not row:
                _overwrite(tree.leaves((row.param, row.state)), tree.leaves((place.param, place.state)))


def _contiguous(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, Tensor) else leaf


def _at_least(scratch: Tensor, like: Tensor) -> Tensor:
    fits = (scratch.dtype, scratch.device) == (like.dtype, like.device) and scratch.numel() >= like.numel()
    return scratch if fits else torch.empty(like.numel(), dtype=like.dtype, device=like.device)


def _replace(leafwise: Leafwise, row: Row, coefficients: Any) -> None:
    update, state = leafwise.leaf(*row, coefficients)
    targets, values = tree.leaves(row.state), tree.leaves(state)
    update, *values = _apart([update, *values], [row.param, *targets])
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)  # torch returns at once where value is target
    row.param.add_(update)


def _differentiated(values: Tree) -> bool:
    leaves = [leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
        return True
    return any(forward_ad.unpack_dual(leaf).tangent is not None for leaf in leaves)  # type: ignore[no-untyped-call]


def _overwrite(targets: list[Tensor], values: list[Tensor]) -> None:
    for target, value in zip(targets, _apart(values, targets), strict=True):
        target.copy_(value)


def _apart(values: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    # A pure function may return an old value in a new place (the pending update of a delay, say), where a write
    # to another target would change it before it is read.
    owned = {target.untyped_storage().data_ptr() for target in targets}

    def apart(value: Tensor, target: Tensor) -> Tensor:
        return value.clone() if value is not target and value.untyped_storage().data_ptr() in owned else value

    return [apart(value, target) for value, target in zip(values, targets, strict=True)]
