"""How a checkpoint's tensors hold a model's parameters: a table of data, read both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor


class Layout(NamedTuple):
    """The axes of a stored tensor that holds leaves in another order, or several of them.

    >>> fused = Layout("(part rows) width", "part", "rows width", {"part": 3})  # three weights, one below the other
    >>> [tuple(leaf.shape) for leaf in fused.leaves(torch.zeros(12, 5))]
    [(4, 5), (4, 5), (4, 5)]
    """

    stored: str
    """Axes of the stored tensor, as in einops."""
    lead: str
    """Axes of it that count leaves, outermost first; may be empty."""
    leaf: str
    """Axes of a leaf."""
    sizes: Mapping[str, int] = MappingProxyType({})
    """Of axes that cannot be told from the stored shape."""

    def leaves(self, tensor: Tensor) -> list[Tensor]:
        """Returns the leaves in `tensor`, as views of it."""
        stacked = rearrange(tensor, f"{self.stored} -> {self.lead} {self.leaf}", **self.sizes)
        lead = stacked.shape[: len(self.lead.split())]
        return [stacked[index] for index in product(*map(range, lead))]

    def tensor(self, leaves: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Returns the tensor of `shape` that stores the leaves."""
        blank = torch.empty(shape, device="meta")
        stacked = rearrange(blank, f"{self.stored} -> {self.lead} {self.leaf}", **self.sizes).shape
        whole = torch.stack(list(leaves)).reshape(stacked)
        stored: Tensor = rearrange(whole, f"{self.lead} {self.leaf} -> {self.stored}", **self.sizes)
        return stored


class Stored(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    paths: tuple[tuple[str | int, ...], ...]
    """Of the leaves it holds."""
    layout: Layout | None = None
    """None: it is one leaf."""

    def leaves(self, tensor: Tensor) -> list[Tensor]:
        """Returns the leaves in `tensor`, in the order of `paths`; views of it."""
        return [tensor] if self.layout is None else self.layout.leaves(tensor)

    def tensor(self, leaves: Sequence[Tensor]) -> Tensor:
        """Returns the tensor that stores the leaves, given in the order of `paths`."""
        return leaves[0] if self.layout is None else self.layout.tensor(leaves, self.shape)

    def leaf_shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the leaves."""
        return [tuple(leaf.shape) for leaf in self.leaves(torch.empty(self.shape, device="meta"))]


Row = tuple[str, str] | tuple[str, str, Layout]
"""A stored tensor's name and the letters of its shape, and its layout unless it is one leaf."""

Table = tuple[Stored, ...]
"""Every tensor of a checkpoint."""


def table(
    rows: Mapping[str, Row], sizes: Mapping[str, int], *, path: tuple[str | int, ...] = (), prefix: str = ""
) -> Table:
    """Returns the table that `rows` spell: leaf path (or several, by spaces) -> name, shape letters, layout.

    Letters stand for numbers in `sizes` (2X: twice X); paths are dotted and go below `path`, names follow `prefix`.

    >>> table({"mlp.up": ("up_proj.weight", "M W")}, {"M": 3, "W": 2}, path=("block0",), prefix="layers.0.")
    (Stored(name='layers.0.up_proj.weight', shape=(3, 2), paths=(('block0', 'mlp', 'up'),), layout=None),)
    """
    return tuple(
        Stored(
            prefix + row[0],
            tuple(_size(factor, sizes) for factor in row[1].split()),
            tuple((*path, *map(_step, leaf.split("."))) for leaf in leaves.split()),
            row[2] if len(row) == 3 else None,
        )
        for leaves, row in rows.items()
    )


def _size(factor: str, sizes: Mapping[str, int]) -> int:
    """Returns the number that a letter stands for, times the digits before it, as in 2X."""
    return int(factor[:-1] or 1) * sizes[factor[-1]]


def _step(name: str) -> str | int:
    return int(name) if name.isdigit() else name


def build(leaves: Mapping[tuple[str | int, ...], Any]) -> Any:
    """Returns the tree with these leaves: dicts, and tuples where a path has numbers.

    >>> build({("a", 0): 1, ("a", 1): 2, ("b",): 3})
    {'a': (1, 2), 'b': 3}
    """
    if () in leaves:
        return leaves[()]
    below: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for path, leaf in leaves.items():
        below.setdefault(path[0], {})[path[1:]] = leaf
    if all(isinstance(key, int) for key in below):
        return tuple(build(below[key]) for key in sorted(below))
    return {key: build(rest) for key, rest in below.items()}
