"""Transformations one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from rpfunc.errors import OptimizerError
from rpfunc.optim.base import Transformation, from_leafwise
from rpfunc.optim.leafwise import Leafwise, Overwrite
from rpfunc.optim.linear import Linear
from rpfunc.tree import Tree

_Linears = list[tuple[int, Callable[[Any, Any], Linear]]]


def chain(*transformations: Transformation) -> Transformation:
    """Returns the composition, first to last; a tuple of states, one for each.

    Leafwise transformations make a leafwise chain if at most the first reduces over the tree, as clipping does: a
    later one would need the updates of all leaves before it could start. Any other chain sees whole trees.
    Raises OptimizerError, from `update`, if the state has another number of parts.
    """
    leafwise = [transformation.leafwise for transformation in transformations]
    links = [link for link in leafwise if link is not None]
    if len(links) == len(transformations) and all(link.reduce is None for link in links[1:]):
        return from_leafwise(_chain_leafwise(links))
    return _chain_trees(transformations)


def _chain_leafwise(links: list[Leafwise]) -> Leafwise:
    first_reduce = links[0].reduce if links else None

    def reduce(path: str, update: Tensor, states: Any, shared: Any) -> float:
        assert first_reduce is not None
        return first_reduce(path, update, states[0], shared[0])

    def scalars(shared: Any, total: float | None) -> tuple[Any, Any]:
        _check_count(len(links), shared)
        pairs = [
            link.scalars(part, total if index == 0 else None)
            for index, (link, part) in enumerate(zip(links, shared, strict=True))
        ]
        return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)

    def leaf(path: str, update: Tensor, states: Any, param: Tensor, coefficients: Any) -> tuple[Tensor, Any]:
        pending, next_states = Linear(), []
        for link, state, part in zip(links, states, coefficients, strict=True):
            if link.linear is not None:
                pending = pending.then(link.linear(state, part))
            else:
                update, state = link.leaf(path, pending(update, param), state, param, part)
                pending = Linear()
            next_states.append(state)
        return pending(update, param), tuple(next_states)

    # A step in one needs a single link that is not linear: two could find each other's tensors in what they overwrite.
    others = [place for place, link in enumerate(links) if link.linear is None]
    core = others[0] if len(others) == 1 else None
    linears = [(place, link.linear) for place, link in enumerate(links) if link.linear is not None]

    return Leafwise(
        leaf=leaf,
        init_leaf=lambda path, param: tuple(link.init_leaf(path, param) for link in links),
        init_shared=lambda: tuple(link.init_shared() for link in links),
        scalars=scalars,
        reduce=None if first_reduce is None else reduce,
        elementwise=all(link.elementwise for link in links),
        linear=None if others else partial(_fold, linears),
        overwrite=None if core is None else _around(core, links[core].overwrite, linears),
    )


def _fold(linears: _Linears, states: Any, coefficients: Any) -> Linear:
    folded = Linear()
    for place, linear in linears:
        folded = folded.then(linear(states[place], coefficients[place]))
    return folded


def _around(core: int, core_overwrite: Overwrite | None, linears: _Linears) -> Overwrite | None:
    if core_overwrite is None:
        return None
    earlier = [(place, linear) for place, linear in linears if place < core]
    later = [(place, linear) for place, linear in linears if place > core]

    def overwrite(
        path: str, update: Tensor, states: Any, param: Tensor, coefficients: Any, following: Linear, scratch: Tensor
    ) -> None:
        update = _fold(earlier, states, coefficients)(update, param, out=scratch)
        after = _fold(later, states, coefficients).then(following)
        core_overwrite(path, update, states[core], param, coefficients[core], after, scratch)

    return overwrite


def _chain_trees(transformations: tuple[Transformation, ...]) -> Transformation:
    def init(params: Tree) -> Any:
        return tuple(transformation.init(params) for transformation in transformations)

    def update(updates: Tree, states: Any, params: Tree) -> tuple[Tree, Any]:
        _check_count(len(transformations), states)
        next_states = []
        for transformation, state in zip(transformations, states, strict=True):
            updates, state = transformation.update(updates, state, params)
            next_states.append(state)
        return updates, tuple(next_states)

    return Transformation(init, update)


def _check_count(transformations: int, states: Any) -> None:
    if not isinstance(states, tuple) or len(states) != transformations:
        found = f"{len(states)} states" if isinstance(states, tuple) else f"a {type(states).__name__}"
        raise OptimizerError(f"chain of {transformations} transformations was given {found}; init returns one for each")
