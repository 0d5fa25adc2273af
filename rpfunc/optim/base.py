"""An optimizer is a pair of pure functions: `init` makes a state, `update` turns gradients into changes.

    updates, state = transformation.update(gradients, state, params)
    params = apply_updates(params, updates)

Source: optax's gradient transformations (DeepMind, 2020), on torch tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import OptimizerError
from rpfunc.optim.leafwise import Leafwise, LeafwiseState, advance, measure, prepare
from rpfunc.optim.rows import check_params, check_updates
from rpfunc.tree import Tree


@dataclass(frozen=True)
class Transformation:
    """A pair of pure functions on pytrees, neither of which overwrites what it is given.

    init: params to state, a pytree of tensors (so that it can be saved); counts are 0-d int64.
    update: (updates, state, params) to (updates, state). Updates are changes to add to params.
    leafwise: the same, leaf by leaf, if it can be told so; else None, and `update` needs the whole tree.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]
    leafwise: Leafwise | None = None


def from_leafwise(leafwise: Leafwise) -> Transformation:
    """Returns the transformation of whole trees that a `Leafwise` describes; its state is a `LeafwiseState`.

    Its `init` and `update` raise OptimizerError if a parameter is not floating-point or trees do not match.
    Updates come out in the parameters' `working_dtype`, float32 or wider, as does all state.
    """

    def init(params: Tree) -> LeafwiseState:
        check_params(params)
        leaves, structure = tree.flatten(params)
        states = [leafwise.init_leaf(path, leaf) for path, leaf in zip(tree.paths(params), leaves, strict=True)]
        return LeafwiseState(leafwise.init_shared(), tree.unflatten(structure, states))

    def update(updates: Tree, state: LeafwiseState, params: Tree) -> tuple[Tree, LeafwiseState]:
        check_leafwise_state(state)
        coefficients, shared = prepare(leafwise, measure(leafwise, updates, state, params), state.shared)
        updates, leaves = advance(leafwise, updates, state.leaves, params, coefficients)
        return updates, LeafwiseState(shared, leaves)

    return Transformation(init, update, leafwise)


def check_leafwise_state(state: Any) -> None:
    """Raises OptimizerError if `state` is not one that a leafwise transformation made."""
    if not isinstance(state, LeafwiseState):
        raise OptimizerError(
            f"optimizer state is a {type(state).__name__}; needed is the LeafwiseState that init returns"
        )


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Returns `params + updates`, leaf by leaf, added in the wider dtype and rounded to the parameter's.

    Raises OptimizerError if the trees do not match.

    >>> apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([1.0, -1.0])})
    {'w': tensor([2., 0.])}
    """
    check_params(params)
    check_updates(updates, params)
    return tree.map(_apply, params, updates)


def _apply(param: Tensor, update: Tensor) -> Tensor:
    return torch.add(param, update).to(param.dtype)
