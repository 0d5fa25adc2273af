"""Parameters that are not trained: no gradient is computed or held for them, and gradients still pass through."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rpfunc import tree
from rpfunc.model import Model, Params


@dataclass(frozen=True)
class Frozen:
    """A leaf that a vector-Jacobian product passes over; not a tensor, so it is no floating-point leaf."""

    tensor: Tensor


def freeze(model: Model, params: Params, frozen: tree.Mask) -> tuple[Model, Params]:
    """Returns (model, params) with the same outputs, in which the leaves that `frozen` selects are `Frozen`.

    Raises TreeError if the mask has something else than booleans, or says nothing of a leaf.
    """
    leaves, structure = tree.flatten(dict(params))
    chosen = tree.choices(dict(params), frozen)
    marked = [Frozen(leaf) if yes else leaf for leaf, yes in zip(leaves, chosen, strict=True)]
    layers = tuple(replace(layer, form=layer.form.precompose(_thaw)) for layer in model.layers)
    return Model(layers), tree.unflatten(structure, marked)


def _thaw(params: Any) -> Any:
    return tree.map(lambda leaf: leaf.tensor if isinstance(leaf, Frozen) else leaf, params)
