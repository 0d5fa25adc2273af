"""Transformations of some leaves only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rpfunc import tree
from rpfunc.optim.base import Transformation, from_leafwise
from rpfunc.optim.leafwise import Leafwise
from rpfunc.optim.linear import Linear
from rpfunc.tree import Mask, Tree


def masked(inner: Transformation, mask: Mask) -> Transformation:
    """Returns `inner` for the leaves that the mask selects; the updates of the others stay as they are.

    A leafwise `inner` stays leafwise, and its mask is read once, by `init`: the state remembers the choice.
    Raises TreeError if a mask has something else than booleans, or, from `init`, says nothing of a leaf.

    >>> no_decay_on_vectors = lambda path, leaf: leaf.ndim >= 2
    """
    selects = tree.selector(mask)
    if inner.leafwise is None:
        return _masked_tree(inner, selects)
    return from_leafwise(_masked_leafwise(inner.leafwise, selects))


def _masked_leafwise(inner: Leafwise, selects: Callable[[str, Tensor], bool]) -> Leafwise:
    # A leaf's state is (state of inner,) if selected, else (). A mask that asks for a leaf's shape could not be
    # asked again about a block of it.
    def init_leaf(path: str, param: Tensor) -> Any:
        return (inner.init_leaf(path, param),) if selects(path, param) else ()

    def reduce(path: str, update: Tensor, state: Any, shared: Any) -> float:
        assert inner.reduce is not None
        return inner.reduce(path, update, state[0], shared) if state else 0.0

    def leaf(path: str, update: Tensor, state: Any, param: Tensor, coefficients: Any) -> tuple[Tensor, Any]:
        if not state:
            return update, state
        update, inner_state = inner.leaf(path, update, state[0], param, coefficients)
        return update, (inner_state,)

    def linear(state: Any, coefficients: Any) -> Linear:
        assert inner.linear is not None
        return inner.linear(state[0], coefficients) if state else Linear()

    def overwrite(
        path: str, update: Tensor, state: Any, param: Tensor, coefficients: Any, following: Linear, scratch: Tensor
    ) -> None:
        assert inner.overwrite is not None
        if state:
            inner.overwrite(path, update, state[0], param, coefficients, following, scratch)
        else:
            following.add_(param, update)

    return Leafwise(
        leaf=leaf,
        init_leaf=init_leaf,
        init_shared=inner.init_shared,
        scalars=inner.scalars,
        reduce=None if inner.reduce is None else reduce,
        elementwise=inner.elementwise,
        linear=None if inner.linear is None else linear,
        overwrite=None if inner.overwrite is None else overwrite,
    )


def _masked_tree(inner: Transformation, selects: Callable[[str, Tensor], bool]) -> Transformation:
    # inner sees the tree with None, an empty subtree, in place of each leaf that is not selected.
    def pruned(values: Tree, params: Tree) -> Tree:
        chosen = [selects(path, leaf) for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True)]
        leaves = [leaf if choice else None for leaf, choice in zip(tree.leaves(values), chosen, strict=True)]
        return tree.unflatten(tree.flatten(params)[1], leaves)

    def init(params: Tree) -> Any:
        return inner.init(pruned(params, params))

    def update(updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        changed, state = inner.update(pruned(updates, params), state, pruned(params, params))
        by_path = dict(zip(tree.paths(changed), tree.leaves(changed), strict=True))
        leaves = [by_path.get(path, leaf) for path, leaf in zip(tree.paths(updates), tree.leaves(updates), strict=True)]
        return tree.unflatten(tree.flatten(updates)[1], leaves), state

    return Transformation(init, update)
