"""Sums of gradients: whole tensors, or of a table the rows that were looked up.

A batch looks up few rows of a large table, so nearly all of its gradient is zeros. Rows are kept as they came, and
added to a whole tensor when there is one: of a tied embedding that is the head's gradient. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """A sum whose additions to rows are still to be done, in order; a pytree of tensors.

    places  rows (n,) int64 of each addition, a row as often as it was looked up
    values  what is added to each (n, ...)
    """

    places: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


Sum = Tensor | Rows
"""The sum of one leaf's gradients."""

Sums = tuple[Sum, ...]
"""The sums of a layer's gradients, in the order of its floating-point leaves."""


def add(total: Sum, part: Sum) -> Sum:
    """Returns total + part, in place where one is a tensor; both are donated.

    On a CPU the additions have one order. Cost: that of the rows, where either is `Rows`.

    >>> add(Rows((torch.tensor([2, 2]),), (torch.ones(2, 1),)), torch.zeros(3, 1)).tolist()
    [[0.0], [0.0], [2.0]]
    """
    if isinstance(total, Rows):
        if isinstance(part, Rows):
            return Rows(total.places + part.places, total.values + part.values)
        total, part = part, total
    if isinstance(part, Tensor):
        return total.add_(part)
    for places, values in zip(*part, strict=True):
        total.index_add_(0, places, values)
    return total


def whole(total: Sum, leaf: Tensor) -> Tensor:
    """Returns the sum, donated, as a tensor of the shape of `leaf`."""
    if isinstance(total, Tensor):
        return total
    found = add(torch.zeros(leaf.shape, dtype=total.values[0].dtype, device=total.values[0].device), total)
    assert isinstance(found, Tensor)
    return found


def whole_sums(sums: Sums, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns a layer's sums, donated, as tensors of the shapes of `leaves`."""
    return tuple(whole(total, leaf) for total, leaf in zip(sums, leaves, strict=True))
