"""Donated steps: the next parameters and state take over the storage of the present ones.

The same pure functions as in `step` run here, on blocks of a leaf, and their results are copied over the block
before the next one is read. No temporary as large as a leaf exists, the work stays in the cache, and the bits
equal those of `step`, since an elementwise function cannot tell a block from a leaf.

Source: own; 'donation' is JAX's word for giving up a buffer to a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import OptimizerError
from rpfunc.optim.base import Transformation, check_leafwise_state, step
from rpfunc.optim.donatable import check_donatable
from rpfunc.optim.leafwise import Leafwise, measure, prepare
from rpfunc.optim.rows import BLOCK_NUMEL, blocks, rows, widened
from rpfunc.tree import Tree


def step_donated(
    transformation: Transformation, updates: Tree, state: Any, params: Tree, *, block_numel: int = BLOCK_NUMEL
) -> tuple[Tree, Any]:
    """Returns the next params and state, bit for bit those of `step`, in the storage of the present ones.

    Use only what is returned: `params` and `state` have been given up. `updates` are only read.
    Memory: blocks of `block_numel` elements if the transformation is elementwise, else as `step`.
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

    As `advance`, and the updates are applied. It does not ask `check_donatable`: the caller has, once, for all parts.
    """
    with torch.no_grad():
        for row in rows(updates, leaves, params):
            for piece in blocks(row, block_numel) if leafwise.elementwise else [row]:
                update, state = leafwise.leaf(*widened(piece), coefficients)
                targets, values = tree.leaves(piece.state), tree.leaves(state)
                update, *values = _apart([update, *values], [piece.param, *targets])
                for target, value in zip(targets, values, strict=True):
                    target.copy_(value)  # torch returns at once where value is target
                piece.param.add_(update)


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
