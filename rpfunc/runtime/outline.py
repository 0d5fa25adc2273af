"""Values without their numbers, on which the memory that work on them takes depends: hashable, holding no tensor."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from optree import PyTreeSpec
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.stream.freeze import Frozen

MOST_OF_A_SIZE = 1 << 40
"""Whole numbers beyond this are no sizes: they are random keys, which differ from batch to batch."""


@dataclass(frozen=True)
class Alike:
    """A value that stands for all with an equal key."""

    key: Hashable
    value: Any = field(compare=False, repr=False)


class Shape(NamedTuple):
    """All of a tensor but its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Outline(NamedTuple):
    """A pytree of such stand-ins for leaves."""

    leaves: tuple[Any, ...]
    structure: PyTreeSpec

    @classmethod
    def of(cls, structured: Any) -> Outline:
        """Returns the outline of a pytree of any leaves, frozen ones too."""
        leaves, structure = tree.flatten(structured)
        return cls(tuple(map(_stand_in, leaves)), structure)

    @classmethod
    def of_batch(cls, batch: Batch) -> Outline:
        """Returns the outline of a batch."""
        parts = ("row", "example", "group", "constant")
        return cls.of({**vars(batch), **{part: dict(getattr(batch, part)) for part in parts}})

    def fill(self) -> Any:
        """Returns a pytree of the outline with tensors whose numbers are not set."""
        return tree.unflatten(self.structure, list(map(_example, self.leaves)))


def _stand_in(leaf: Any) -> Any:
    """Returns what a leaf is by its shape, or by its value where that may be a size, else by what it is."""
    if isinstance(leaf, Frozen):
        return Frozen(_stand_in(leaf.tensor))
    if isinstance(leaf, Tensor):
        return Shape(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device)
    if isinstance(leaf, float | complex) or (isinstance(leaf, int) and abs(leaf) > MOST_OF_A_SIZE):
        return Alike((type(leaf),), leaf)
    if isinstance(leaf, int | str | bytes | None):
        return Alike((type(leaf), leaf), leaf)
    return Alike(id(leaf), leaf)  # which cannot become another's as long as this holds it


def _example(stand_in: Any) -> Any:
    if isinstance(stand_in, Frozen):
        return Frozen(_example(stand_in.tensor))
    if isinstance(stand_in, Shape):
        shape, strides, dtype, device = stand_in
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return stand_in.value
