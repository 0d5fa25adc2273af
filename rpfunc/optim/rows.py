"""Rows: a leaf's path, update, state and parameter side by side, whole or in blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import OptimizerError
from rpfunc.tree import Tree

BLOCK_NUMEL = 2**20
"""Elements in a block: 4 MiB of float32. Less, and the cost of a call shows; more, and temporaries leave the cache."""

UNIT_NUMEL = 64
"""Elements that no block cuts: torch may round what is left of a tensor after its last full vector otherwise."""


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
    dtype = working_dtype(row.param)
    return row if row.update.dtype == dtype else row._replace(update=row.update.to(dtype))


def contiguous(row: Row) -> Row:
    """Returns the row in contiguous memory: itself, or copies, since torch may round otherwise in other layouts."""
    if all(tensor.is_contiguous() for tensor in (row.update, row.param, *tree.leaves(row.state))):
        return row
    return Row(row.path, *tree.map(torch.Tensor.contiguous, row[1:]))


def check_params(params: Tree) -> None:
    """Raises OptimizerError that lists every leaf which is not a real floating-point tensor."""
    leaves = tree.leaves(params)
    if all(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves):
        return
    problems = []
    for path, leaf in zip(tree.paths(params), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            problems.append(f"{path} is a {type(leaf).__name__}; a tensor is needed")
        elif not leaf.is_floating_point():
            problems.append(f"{path} is {leaf.dtype}; a floating-point dtype is needed, such as torch.float32")
    raise OptimizerError.listing("parameters", problems)


def check_updates(updates: Tree, params: Tree) -> None:
    """Raises OptimizerError that lists every update which is missing, unexpected or of another shape."""
    if tree.same_structure(updates, params):
        pairs = list(zip(tree.leaves(updates), tree.leaves(params), strict=True))
        wrong = [index for index, (update, param) in enumerate(pairs) if _misfit(update, param)]
        paths = tree.paths(params) if wrong else []
        problems = [f"{paths[index]}: update {_misfit(*pairs[index])}" for index in wrong]
    else:
        update_paths, param_paths = tree.paths(updates), tree.paths(params)
        problems = [
            f"{path} has a parameter but no update; zeros would do" for path in param_paths if path not in update_paths
        ]
        problems += [f"{path} has an update but no parameter" for path in update_paths if path not in param_paths]
        if not problems:
            problems = [f"containers differ: {tree.flatten(updates)[1]} is not {tree.flatten(params)[1]}"]
    if problems:
        raise OptimizerError.listing("updates do not fit the parameters", problems)


def _misfit(update: Any, param: Tensor) -> str | None:
    if not isinstance(update, Tensor):
        return f"is a {type(update).__name__}; a tensor is needed"
    if update.shape != param.shape:
        return f"has shape {tuple(update.shape)}, parameter {tuple(param.shape)}"
    return None


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
        found = {path.rpartition(".")[0] for path in tree.paths(leaf_states)}
        missing = [path for path in tree.paths(params) if path not in found]
        words = f" (there is none for {missing[0]}, for example)" if missing else ""
        raise OptimizerError(
            f"optimizer state does not fit the parameters; init makes one that does{words}; with frozen leaves, "
            "State.create and train_steps need the same `frozen`"
        ) from error
    return [Row(*row) for row in zip(tree.paths(params), tree.leaves(updates), states, param_leaves, strict=True)]


def blocks(row: Row, numel: int = BLOCK_NUMEL) -> Iterator[Row]:
    """Yields a contiguous row as flat views of at most `numel` elements.

    `numel` is rounded up to a multiple of `UNIT_NUMEL`, so that all but the last end with a full vector.
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
    numel = -(-numel // UNIT_NUMEL) * UNIT_NUMEL
    if row.param.numel() <= numel:
        yield row
        return
    for update, param, *state in zip(*(tensor.view(-1).split(numel) for tensor in tensors), strict=True):
        yield Row(row.path, update, tree.unflatten(structure, state), param)
