"""Parameters that are not trained: no gradient is computed or held for them, and gradients still pass through."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import TreeError, note
from rpfunc.model import Model, Params


@dataclass(frozen=True)
class Frozen:
    """A leaf that a vector-Jacobian product passes over; not a tensor, so it is no floating-point leaf."""

    tensor: Tensor


def frozen_leaves(params: Params, frozen: tree.Mask | None) -> list[bool]:
    """Returns of each leaf, in leaf order, whether `frozen` selects it; None selects none.

    Raises TreeError if the mask has something else than booleans, or says nothing of a leaf.
    """
    try:
        return tree.choices(dict(params), False if frozen is None else frozen)
    except TreeError as error:
        raise TreeError(f"frozen: {error}") from error
    except Exception as error:
        note(error, "in the function given as frozen")
        raise


def freeze(model: Model, params: Params, frozen: tree.Mask) -> tuple[Model, Params]:
    """Returns (model, params) with the same outputs, in which the leaves that `frozen` selects are `Frozen`.

    Raises TreeError if the mask has something else than booleans, or says nothing of a leaf.
    """
    params = dict(params)
    chosen = tree.unflatten(tree.flatten(params)[1], frozen_leaves(params, frozen))
    return thawing(model), mark(params, chosen)


def thawing(model: Model) -> Model:
    """Returns the model that takes parameters some of whose leaves are `Frozen`."""
    return Model(tuple(replace(layer, form=layer.form.precompose(_thaw)) for layer in model.layers))


def mark(params: Any, chosen: Any) -> Any:
    """Returns any part of the parameters with `Frozen` leaves where `chosen`, of the same structure, has True."""
    return tree.map(lambda leaf, yes: Frozen(leaf) if yes else leaf, params, chosen)


def _thaw(params: Any) -> Any:
    return tree.map(lambda leaf: leaf.tensor if isinstance(leaf, Frozen) else leaf, params)


def cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    """Returns a leaf, frozen or not, in another dtype."""
    return Frozen(leaf.tensor.to(dtype)) if isinstance(leaf, Frozen) else leaf.to(dtype)
