"""A batch: tensors that say along which dimensions they may be cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.checks import count_problems, is_count, plain_number, shown
from rpfunc.errors import BatchError


@dataclass(frozen=True)
class Batch:
    """What a model's layers and its objective read beside the parameters; a value, never mutated.

    row       leaves (B, T, ...): cut by examples (dimension 0) and by rows (dimension 1), e.g. tokens, labels
    example   leaves (B, ...): cut by examples
    group     leaves (B / group_size, ...): cut by groups of `group_size` examples that follow each other
    constant  anything, never cut, e.g. a random key
    first_example, first_row  where this piece stands in the whole batch: positions and random draws use them

    Raises BatchError where leaves disagree on B or T.

    >>> import torch
    >>> batch = Batch(row={"tokens": torch.arange(12).reshape(2, 6)})
    >>> batch.rows(4, 6).row["tokens"].tolist(), batch.rows(4, 6).first_row
    ([[4, 5], [10, 11]], 4)
    """

    row: Mapping[str, Any] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)
    group: Mapping[str, Any] = field(default_factory=dict)
    constant: Mapping[str, Any] = field(default_factory=dict)
    group_size: int = 1
    first_example: int = 0
    first_row: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_size", plain_number(self.group_size))
        parts = {"row": self.row, "example": self.example, "group": self.group, "constant": self.constant}
        odd = [
            f"{name} is a {type(part).__name__}, needs a dict of leaves by name"
            for name, part in parts.items()
            if not isinstance(part, Mapping)
        ]
        odd += count_problems({"group_size": self.group_size})
        if odd:
            raise BatchError.listing("batch", odd)
        sizes = [(f"row.{path}", leaf, 1) for path, leaf in _named(self.row)]
        sizes += [(f"example.{path}", leaf, 1) for path, leaf in _named(self.example)]
        sizes += [(f"group.{path}", leaf, self.group_size) for path, leaf in _named(self.group)]
        odd = [
            f"{name} is a {type(leaf).__name__}, needs a tensor"
            for name, leaf, _ in sizes
            if not isinstance(leaf, Tensor)
        ]
        if odd:
            raise BatchError.listing("batch", odd)
        sparse = [
            f"{name} is {leaf.layout}, needs a dense tensor" for name, leaf, _ in sizes if leaf.layout != torch.strided
        ]
        if sparse:
            raise BatchError.listing("batch", sparse)
        flat = [name for name, leaf, _ in sizes if leaf.dim() < (2 if name.startswith("row.") else 1)]
        if flat:
            raise BatchError.listing(
                "batch",
                [f"{name} needs dimensions ({'B, T' if name.startswith('row.') else 'B'}, ...)" for name in flat],
            )
        examples = {name: leaf.shape[0] * factor for name, leaf, factor in sizes}
        rows = {f"row.{path}": leaf.shape[1] for path, leaf in _named(self.row)}
        problems = []
        if len(set(examples.values())) > 1:
            problems.append(f"leaves disagree on the number of examples B: {examples}")
        if len(set(rows.values())) > 1:
            problems.append(f"row leaves disagree on the number of rows T: {rows}")
        if 0 in rows.values():
            problems.append("row leaves have 0 rows, at least 1 is needed")
        if examples and next(iter(examples.values())) % self.group_size:
            problems.append(f"{next(iter(examples.values()))} examples are no multiple of group_size {self.group_size}")
        if problems:
            raise BatchError.listing("batch", problems)

    @property
    def num_examples(self) -> int:
        """B. Raises BatchError for a batch without row, example and group leaves."""
        for leaves, factor in ((self.row, 1), (self.example, 1), (self.group, self.group_size)):
            for _, leaf in _named(leaves):
                return int(leaf.shape[0]) * factor
        raise BatchError("batch: has no row, example or group leaf, so its number of examples is unknown")

    @property
    def num_rows(self) -> int:
        """T. Raises BatchError for a batch without row leaves."""
        for _, leaf in _named(self.row):
            return int(leaf.shape[1])
        raise BatchError("batch: has no row leaf, so its number of rows is unknown")

    def rows(self, start: int, stop: int) -> Batch:
        """Returns the piece with rows start to stop, contiguous: views where they are so already, else copies.

        Raises BatchError if it has no such rows.
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise BatchError(f"batch: has rows 0 to {self.num_rows}, not {start} to {stop}")
        return replace(
            self,
            row=tree.map(lambda leaf: leaf[:, start:stop].contiguous(), self.row),
            first_row=self.first_row + start,
        )

    def examples(self, start: int, stop: int) -> Batch:
        """Returns the piece with examples start to stop (views, no copy). Raises BatchError if that cuts a group."""
        if not 0 <= start <= stop <= self.num_examples:
            raise BatchError(f"batch: has examples 0 to {self.num_examples}, not {start} to {stop}")
        if start % self.group_size or stop % self.group_size:
            raise BatchError(f"batch: examples {start} to {stop} cut a group of {self.group_size} examples")
        groups = slice(start // self.group_size, stop // self.group_size)
        return replace(
            self,
            row=tree.map(lambda leaf: leaf[start:stop], self.row),
            example=tree.map(lambda leaf: leaf[start:stop], self.example),
            group=tree.map(lambda leaf: leaf[groups], self.group),
            first_example=self.first_example + start,
        )

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """Returns the batch with `function` applied to every leaf, constants too; it must not change B or T."""
        return replace(
            self,
            row=tree.map(function, self.row),
            example=tree.map(function, self.example),
            group=tree.map(function, self.group),
            constant=tree.map(function, self.constant),
        )

    def microbatches(self, num: int) -> list[Batch]:
        """Returns the batch cut into `num` runs of whole groups, sizes differing by at most one group, larger first.

        Fewer groups than `num` give fewer microbatches. Raises BatchError for num < 1 or an empty batch.
        """
        num_groups = self.num_examples // self.group_size
        if not is_count(num) or num < 1 or num_groups < 1:
            raise BatchError(
                f"batch: cannot cut {num_groups} groups into {shown(num)} microbatches, both must be at least 1"
            )
        num = min(int(num), num_groups)
        size, larger = divmod(num_groups, num)
        stops = [(index * size + min(index, larger)) * self.group_size for index in range(num + 1)]
        return [self.examples(start, stop) for start, stop in pairwise(stops)]


def _named(leaves: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list(zip(tree.paths(leaves), tree.leaves(leaves), strict=True))
