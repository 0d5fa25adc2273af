"""Pytrees of tensors: dicts, lists, tuples and named tuples, nested, with tensors as leaves.

A thin layer over `optree`, which does the work. Dict entries are visited in sorted key order, so that
two dicts with the same entries are the same tree; `None` is an empty subtree, not a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from rpfunc.errors import TreeError

Tree = Any
"""A pytree: any nesting of containers around leaves. Python's type system cannot say more."""


def flatten(tree: Tree) -> tuple[list[Any], optree.PyTreeSpec]:
    """Returns the leaves in order, and the structure that `unflatten` needs to put them back.

    >>> flatten({"b": 2, "a": (1, None)})[0]
    [1, 2]
    """
    leaves, structure = optree.tree_flatten(tree)
    return list(leaves), structure


def unflatten(structure: optree.PyTreeSpec, leaves: Sequence[Any]) -> Tree:
    """Returns the tree with `structure` whose leaves, in order, are `leaves`."""
    return optree.tree_unflatten(structure, leaves)


def leaves(tree: Tree) -> list[Any]:
    """Returns the leaves in order."""
    return list(optree.tree_leaves(tree))


def map(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:  # noqa: A001  (jax.tree.map)
    """Returns `function` applied leaf by leaf over trees of one structure.

    Raises TreeError where the structures differ.

    >>> map(lambda a, b: a + b, {"x": 1}, {"x": 10})
    {'x': 11}
    """
    try:
        return optree.tree_map(function, tree, *rest)
    except ValueError as error:
        if isinstance(error, TreeError) or all(same_structure(tree, other) for other in rest):
            raise  # the function's own error
        raise TreeError(f"trees differ in structure: {error}") from error


def same_structure(left: Tree, right: Tree) -> bool:
    """Returns whether both trees have the same containers and keys, whatever their leaves."""
    return bool(optree.tree_structure(left) == optree.tree_structure(right))


def paths(tree: Tree) -> list[str]:
    """Returns the dotted path of each leaf, in leaf order.

    >>> paths({"block": {"up": 1, "down": 2}, "norm": [3]})
    ['block.down', 'block.up', 'norm.0']
    """
    found = [".".join(str(part) for part in path) for path in optree.tree_paths(tree)]
    if len(set(found)) < len(found):
        twice = next(path for path in found if found.count(path) > 1)
        raise TreeError(f"two leaves have the path {twice!r}: a key must not have a dot where that makes them one")
    return found


Mask = Tree | Callable[[str, Any], bool]
"""Booleans in the structure of a tree, or of a top part of it, each for all leaves below; or a function of a leaf's
dotted path and the leaf."""


def selector(mask: Mask) -> Callable[[str, Any], bool]:
    """Returns the mask as a function of a leaf's dotted path and the leaf.

    Raises TreeError if the mask has something else than booleans; the function, if it says nothing of a leaf.

    >>> selects = selector({"embedding": True, "block": {"up": False, "down": True}})
    >>> selects("embedding.weight", None), selects("block.up", None)
    (True, False)
    """
    if callable(mask):
        return _boolean(mask)
    choices = dict(zip(paths(mask), leaves(mask), strict=True))
    wrong = [f"{path or 'the mask'} is {value!r}" for path, value in choices.items() if not isinstance(value, bool)]
    if wrong:
        raise TreeError.listing("a mask needs True or False at each leaf", wrong)

    def selects(path: str, leaf: Any) -> bool:
        parts = path.split(".")
        for length in range(len(parts), -1, -1):  # the leaf's own path, then each of its parents, then the root
            prefix = ".".join(parts[:length])
            if prefix in choices:
                return bool(choices[prefix])
        raise TreeError(f"the mask says nothing of {path}; it has {sorted(choices)}")

    return selects


def _boolean(mask: Callable[[str, Any], Any]) -> Callable[[str, Any], bool]:
    def selects(path: str, leaf: Any) -> bool:
        choice = mask(path, leaf)
        if not isinstance(choice, bool):
            raise TreeError(f"the mask gives {choice!r} for {path}, needs True or False")
        return choice

    return selects


def choices(tree: Tree, mask: Mask) -> list[bool]:
    """Returns what the mask says of each leaf, in leaf order.

    Raises TreeError if it says nothing of a leaf, or something of a place that the tree does not have.
    """
    selects, known = selector(mask), paths(tree)
    if not callable(mask):
        unknown = [
            f"the tree has nothing at {place!r}"
            for place in paths(mask)
            if place and not any(path == place or path.startswith(f"{place}.") for path in known)
        ]
        if unknown:
            raise TreeError.listing("mask", unknown)
    return [selects(path, leaf) for path, leaf in zip(known, leaves(tree), strict=True)]


def partition(tree: Tree, mask: Mask) -> tuple[Tree, Tree]:
    """Returns (the leaves that the mask selects, the others), each with None, an empty tree, in the other's places.

    >>> partition({"a": 1, "b": 2}, {"a": True, "b": False})
    ({'a': 1, 'b': None}, {'a': None, 'b': 2})
    """
    found, structure = flatten(tree)
    chosen = choices(tree, mask)
    left, right = (
        [leaf if yes == wanted else None for leaf, yes in zip(found, chosen, strict=True)] for wanted in (True, False)
    )
    return unflatten(structure, left), unflatten(structure, right)


def combine(left: Tree, right: Tree) -> Tree:
    """Returns the tree of which `left` and `right` are the two parts that `partition` makes."""
    return optree.tree_map(lambda a, b: b if a is None else a, left, right, none_is_leaf=True)


def zeros_like(tree: Tree) -> Tree:
    """Returns a tree of zeros with the shapes and dtypes of `tree`."""
    return map(torch.zeros_like, tree)


def add(left: Tree, right: Tree) -> Tree:
    """Returns the leafwise sum of two trees of one structure."""
    return map(torch.add, left, right)


def mismatches(found: Tree, wanted: Tree, names: tuple[str, str] = ("found", "needed")) -> list[str]:
    """Returns, in words, every leaf that is missing, unexpected, or of another shape or dtype."""
    found_by_path = dict(zip(paths(found), leaves(found), strict=True))
    wanted_by_path = dict(zip(paths(wanted), leaves(wanted), strict=True))
    problems = [f"{path} is missing" for path in wanted_by_path if path not in found_by_path]
    problems += [f"{path} is unexpected" for path in found_by_path if path not in wanted_by_path]
    for path, leaf in found_by_path.items():
        other = wanted_by_path.get(path, leaf)
        if (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
            problems.append(
                f"{path}: {names[0]} {tuple(leaf.shape)} {leaf.dtype}, {names[1]} {tuple(other.shape)} {other.dtype}"
            )
    return problems
