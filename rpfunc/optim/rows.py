"""Rows: a leaf's path, update, state and parameter side by side, whole or in blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import OptimizerError
from rpfunc.tree import Tree

BLOCK_NUMEL = 2**18
"""Elements in a block: 1 MiB of float32. Less, and torch's cost per call shows; more, and the cache overflows."""


class Row(NamedTuple):
    """One leaf, or one block of it, with everything that belongs to it."""

    path: str
    update: Tensor
    state: Any
    param: Tensor


def working_dtype(param: Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's updates and state: its own, but at least float32.

    >>> working_dtype(torch.zeros(2, dtype=torch.bfloat16))
    torch.float32
    """
    return torch.promote_types(param.dtype, torch.float32)


def widened(row: Row) -> Row:
    """Returns the row with its update in the parameter's working dtype."""
    return row._replace(update=row.update.to(working_dtype(row.param)))


def check_params(params: Tree) -> None:
    """Raises OptimizerError that lists every leaf which is not a real floating-point tensor."""
    problems = []
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        if not isinstance(leaf, Tensor):
            problems.append(f"{path} is a {type(leaf).__name__}; a tensor is needed")
        elif not leaf.is_floating_point():
            problems.append(f"{path} is {leaf.dtype}; a floating-point dtype is needed, such as torch.float32")
    if problems:
        raise OptimizerError.listing("parameters", problems)


def check_updates(updates: Tree, params: Tree) -> None:
    """Raises OptimizerError that lists every update which is missing, unexpected or of another shape."""
    update_paths, param_paths = tree.paths(updates), tree.paths(params)
    problems = [
        f"{path} has a parameter but no update; zeros would do" for path in param_paths if path not in update_paths
    ]
    problems += [f"{path} has an update but no parameter" for path in update_paths if path not in param_paths]
    if not problems and not tree.same_structure(updates, params):
        problems = [f"containers differ: {tree.flatten(updates)[1]} is not {tree.flatten(params)[1]}"]
    if not problems:
        for path, update, param in zip(param_paths, tree.leaves(updates), tree.leaves(params), strict=True):
            if not isinstance(update, Tensor):
                problems.append(f"{path}: update is a {type(update).__name__}; a tensor is needed")
            elif update.shape != param.shape:
                problems.append(f"{path}: update has shape {tuple(update.shape)}, parameter {tuple(param.shape)}")
    if problems:
        raise OptimizerError.listing("updates do not fit the parameters", problems)


def rows(updates: Tree, leaf_states: Tree, params: Tree) -> list[Row]:
    """Returns the leaves of matching trees side by side; `leaf_states` has a leaf's state at each leaf's place.

    Raises OptimizerError where they do not match, or a parameter is not floating-point.
    """
    check_params(params)
    check_updates(updates, params)
    param_leaves, structure = tree.flatten(params)
    try:
        states = structure.flatten_up_to(leaf_states)
    except ValueError as error:
        raise OptimizerError(
            f"optimizer state does not fit the parameters; init makes one that does: {error}"
        ) from error
    return [Row(*row) for row in zip(tree.paths(params), tree.leaves(updates), states, param_leaves, strict=True)]


def blocks(row: Row, numel: int = BLOCK_NUMEL) -> Iterator[Row]:
    """Yields a leaf's row as flat views of at most `numel` elements; whole, if any of its tensors is not contiguous.

    Raises OptimizerError if a tensor of the leaf's state has another shape than the parameter.
    """
    state_leaves, structure = tree.flatten(row.state)
    wrong = [tuple(leaf.shape) for leaf in state_leaves if leaf.shape != row.param.shape]
    if wrong:
        raise OptimizerError(
            f"{row.path}: the state of an elementwise transformation has shapes {wrong}; "
            f"needed is the parameter's, {tuple(row.param.shape)}, or Leafwise(elementwise=False)"
        )
    tensors = [row.update, row.param, *state_leaves]
    if row.param.numel() <= numel or not all(tensor.is_contiguous() for tensor in tensors):
        yield row
        return
    for update, param, *state in zip(*(tensor.view(-1).split(numel) for tensor in tensors), strict=True):
        yield Row(row.path, update, tree.unflatten(structure, state), param)
