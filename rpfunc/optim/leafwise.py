"""A transformation told leaf by leaf: what all leaves share first, then a pure function of each.

The optimizer of a large model never has all of it in hand: a subtree is updated as soon as its gradient has
arrived, and a leaf in blocks that stay in the cache. A `Leafwise` says enough for both:

    reduce    one number over all raw updates: a sum of one part for each leaf (a squared norm, say)
    scalars   that sum and the shared state, to this step's coefficients: a few numbers
    leaf      one leaf's update, state and parameter, with the coefficients, to its next update and state

`leaf` is pure and the parts are added with exact rounding, so a tree taken whole, subtree by subtree in any
order, or block by block, gives the same bits. The three steps are `measure`, `prepare` and `advance` (or
`advance_donated`); all take a whole tree or any part of it whose leaves keep their full paths, such as
`{"block": params["block"]}`.

That is all a transformation needs to say. Two more words make it fast: `linear`, and `overwrite`.

Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import fsum, isfinite
from typing import Any, NamedTuple

from torch import Tensor

from rpfunc import tree
from rpfunc.optim.linear import Linear
from rpfunc.optim.rows import blocks, contiguous, rows, widened
from rpfunc.tree import Tree

Overwrite = Callable[[str, Tensor, Any, Tensor, Any, Linear, Tensor], None]
"""A step in one: see `Leafwise`."""


@dataclass(frozen=True)
class Leafwise:
    """A transformation as pure functions of one leaf.

    leaf: (path, update, leaf state, parameter, coefficients) to (update, leaf state). The update comes in the
        parameter's `working_dtype`, and leaves in it. Nothing that is given may be overwritten.
    init_leaf: (path, parameter) to the leaf's state, a pytree of tensors; default `()`.
    init_shared: () to the state that all leaves share, a pytree of 0-d tensors; default `()`.
    scalars: (shared state, sum of `reduce`, or None) to (coefficients, shared state); called once a step.
    reduce: (path, update, leaf state, shared state) to this leaf's part of the sum; None if no sum is needed.
    elementwise: whether each element is treated on its own. Then `leaf` and `reduce` may be called on flat slices
        of a leaf, `reduce` is additive over slices, and each tensor of a leaf's state has the parameter's shape.
    linear: (leaf state, coefficients) to the `Linear` that is all that `leaf` does, while the leaf's state rests; None
        if it does more. A chain folds it into its neighbours. See `from_linear`.
    overwrite: (path, update, leaf state, parameter, coefficients, linear, scratch): a step in one. It writes `leaf`'s
        next state over the leaf state, and adds `linear` of `leaf`'s update to the parameter, in place; the bits may
        differ from those of `leaf` by rounding. `scratch` is like the update, to write to, and may be the update.
        None: `leaf` and copies do it.
    """

    leaf: Callable[[str, Tensor, Any, Tensor, Any], tuple[Tensor, Any]]
    init_leaf: Callable[[str, Tensor], Any] = lambda path, param: ()
    init_shared: Callable[[], Any] = lambda: ()
    scalars: Callable[[Any, float | None], tuple[Any, Any]] = lambda shared, total: ((), shared)
    reduce: Callable[[str, Tensor, Any, Any], float] | None = None
    elementwise: bool = True
    linear: Callable[[Any, Any], Linear] | None = None
    overwrite: Overwrite | None = None


def from_linear(linear: Callable[[Any, Any], Linear], **fields: Any) -> Leafwise:
    """Returns the `Leafwise` of a linear map, given by (leaf state, coefficients); `fields` are its other fields."""

    def leaf(path: str, update: Tensor, state: Any, param: Tensor, coefficients: Any) -> tuple[Tensor, Any]:
        return linear(state, coefficients)(update, param), state

    return Leafwise(leaf=leaf, linear=linear, **fields)


class LeafwiseState(NamedTuple):
    """What all leaves share, and a tree that has, at the place of each parameter, that leaf's own state."""

    shared: Any
    leaves: Tree


def measure(leafwise: Leafwise, updates: Tree, state: LeafwiseState, params: Tree) -> list[float]:
    """Returns each leaf's part of the sum over all raw updates; `[]` if the transformation needs none.

    Raises OptimizerError if the trees do not match.
    """
    if leafwise.reduce is None:
        return []
    parts = []
    for row in map(contiguous, rows(updates, state.leaves, params)):
        pieces = [widened(piece) for piece in ([row] if not leafwise.elementwise else blocks(row))]
        parts.append(exact_sum(leafwise.reduce(row.path, piece.update, piece.state, state.shared) for piece in pieces))
    return parts


def prepare(leafwise: Leafwise, parts: Iterable[float], shared: Any) -> tuple[Any, Any]:
    """Returns this step's coefficients and the next shared state; `parts` are those of all leaves, in any order."""
    return leafwise.scalars(shared, None if leafwise.reduce is None else exact_sum(parts))


def advance(leafwise: Leafwise, updates: Tree, leaves: Tree, params: Tree, coefficients: Any) -> tuple[Tree, Tree]:
    """Returns the transformed updates and the next leaf states.

    Raises OptimizerError if the trees do not match.
    """
    pairs = [leafwise.leaf(*widened(row), coefficients) for row in rows(updates, leaves, params)]
    structure = tree.flatten(params)[1]
    return tree.unflatten(structure, [pair[0] for pair in pairs]), tree.unflatten(
        structure, [pair[1] for pair in pairs]
    )


def exact_sum(parts: Iterable[float]) -> float:
    """Returns the correctly rounded sum, which no order of the parts can change; nan of infinities of both signs.

    >>> exact_sum([1e16, 1.0, -1e16])
    1.0
    """
    parts = list(parts)
    special = [part for part in parts if not isfinite(part)]
    if special:
        return sum(special)
    try:
        return fsum(parts)
    except OverflowError:  # on the way, or of the sum itself
        return fsum(part * 2.0**-64 for part in parts) * 2.0**64
