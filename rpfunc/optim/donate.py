"""Donated steps: the next parameters and state take over the storage of the present ones.

The same pure functions as in `step` run here, on blocks of a leaf, and their results are copied over the block
before the next one is read. No temporary as large as a leaf exists, the work stays in the cache, and the bits
equal those of `step`, since an elementwise function cannot tell a block from a leaf.

Source: own; 'donation' is JAX's word for giving up a buffer to a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import OptimizerError
from rpfunc.optim.base import Transformation, check_leafwise_state, step
from rpfunc.optim.leafwise import Leafwise, measure, prepare
from rpfunc.optim.rows import BLOCK_NUMEL, blocks, rows, widened
from rpfunc.tree import Tree


def step_donated(
    transformation: Transformation, updates: Tree, state: Any, params: Tree, *, block_numel: int = BLOCK_NUMEL
) -> tuple[Tree, Any]:
    """Returns the next params and state, bit for bit those of `step`, in the storage of the present ones.

    Use only what is returned: `params` and `state` hold no meaningful value afterwards; `updates` are only read.
    Memory: blocks of `block_numel` elements if the transformation is elementwise, else as `step`.
    Raises OptimizerError, before anything is written, if the trees do not match or `check_donatable` refuses them.
    """
    leafwise = transformation.leafwise
    check_donatable(updates, state, params)
    with torch.no_grad():
        if leafwise is None:
            results = step(transformation, updates, state, params)
            if not tree.same_structure(results, (params, state)):
                raise OptimizerError("update returned a state of another structure; its storage cannot be taken over")
            _overwrite(tree.leaves((params, state)), tree.leaves(results))
            return params, state
        check_leafwise_state(state)
        coefficients, shared = prepare(leafwise, measure(leafwise, updates, state, params), state.shared)
        advance_donated(leafwise, updates, state.leaves, params, coefficients, block_numel=block_numel)
        _overwrite(tree.leaves(state.shared), tree.leaves(shared))
        return params, state


def advance_donated(
    leafwise: Leafwise, updates: Tree, leaves: Tree, params: Tree, coefficients: Any, *, block_numel: int = BLOCK_NUMEL
) -> None:
    """Overwrites params and leaf states, of a whole tree or any part of it, by the next ones.

    Like `advance`, with its updates applied. The caller has asked `check_donatable` about all parts together.
    """
    with torch.no_grad():
        for row in rows(updates, leaves, params):
            for piece in blocks(row, block_numel) if leafwise.elementwise else [row]:
                update, state = leafwise.leaf(*widened(piece), coefficients)
                targets = tree.leaves(piece.state)
                update, *values = _detached([update, *tree.leaves(state)], [piece.param, *targets])
                _copy(values, targets)
                piece.param.add_(update)


def check_donatable(updates: Tree, state: Any, params: Tree) -> None:
    """Raises OptimizerError that lists every leaf whose storage must not, or cannot, be overwritten.

    Refused among params and state: a tensor of which one element fills several places (`expand`); a module's
    parameter; memory that torch did not allocate, such as a mapped file or a NumPy array; and two tensors in
    the same memory, one of which would be overwritten. Interleaved views of one tensor, such as columns of a
    matrix, are taken to be apart unless they begin at the same element.
    """
    written = _named("params", params) + _named("state", state)
    problems = []
    for name, tensor in written:
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            problems.append(f"{name} is expanded: several elements share a place; give a contiguous copy")
        elif isinstance(tensor, torch.nn.Parameter):
            problems.append(f"{name} is a module's parameter; give a detached copy")
        elif tensor.numel() and tensor.device.type == "cpu" and not tensor.untyped_storage().resizable():
            problems.append(f"{name} lies in memory that torch does not own, such as a mapped file; give a copy")
    read = {id(tensor) for _, tensor in _named("updates", updates)} - {id(tensor) for _, tensor in written}
    spans = sorted(
        (_span(tensor), name, tensor) for name, tensor in written + _named("updates", updates) if tensor.numel()
    )
    problems += [f"{a} and {b} share memory" for a, b in ()]
    if problems:
        raise OptimizerError.listing("cannot be donated", problems)
