"""What values of a config and leaves of a batch cannot be, in words."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.checks import count_problems, is_count, shown
from rpfunc.errors import BatchError

MOST_SIZE = 2**31 - 1
"""The largest size of anything in a model."""

MOST_LAYERS = 100_000
"""The largest number of layers: more are a slip, and would take minutes only to be made."""


def counts(values: Mapping[Any, Any], least: int = 1, most: int = MOST_SIZE) -> list[str]:
    """Returns each of the named values that is no whole number from `least` to `most`.

    >>> counts({"layers": 0, "width": "8", "heads": 4})
    ['layers is 0, it must be at least 1', "width is '8', it must be a whole number"]
    """
    problems: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            problems.append(f"{name} is {value}, it must be a whole number")
        else:
            problems += count_problems({name: value}, least, most)
    return problems


def many(name: str, values: Any, least: int) -> list[str]:
    """Returns what is wrong with a tuple of at least `least` sizes, 1 or 2.

    >>> many("widths", (6, 0), 2), many("widths", (6, 2.5), 2)[0][-35:]
    (['widths is (6, 0), it needs at least two numbers, each at least 1'], 'each whole and from 1 to 2147483647')
    """
    whole = isinstance(values, tuple | list) and all(map(is_count, values)) and max(values, default=1) <= MOST_SIZE
    if whole and least <= len(values) and min(values) >= 1:
        return []
    numbers = "one number" if least == 1 else "two numbers"
    bounds = "each at least 1" if whole else f"each whole and from 1 to {MOST_SIZE}"
    return [f"{name} is {shown(values)}, it needs at least {numbers}, {bounds}"]


def positives(values: Mapping[str, Any]) -> list[str]:
    """Returns each of the named values that is no positive, finite number."""
    return [
        f"{name} is {shown(value)}, it must be positive and finite"
        for name, value in values.items()
        if not (is_number(value) and value > 0)
    ]


def rates(values: Mapping[str, Any]) -> list[str]:
    """Returns each of the named values that is no rate of dropout."""
    return [
        f"{name} is {shown(value)}, it must be at least 0 and below 1"
        for name, value in values.items()
        if not (is_number(value) and 0 <= value < 1)
    ]


def flags(values: Mapping[str, Any]) -> list[str]:
    """Returns each of the named values that is neither True nor False."""
    return [
        f"{name} is {shown(value)}, it must be True or False"
        for name, value in values.items()
        if not isinstance(value, bool)
    ]


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    exact = value if isinstance(value, int) else float(value)
    return -sys.float_info.max <= exact <= sys.float_info.max


def check_leaf(batch: Batch, part: str, name: str, shape: tuple[str | int, ...], like: Tensor | torch.dtype) -> Tensor:
    """Returns leaf `name` of the batch's `part` ("row", "example"); a word in `shape` stands for any size from 1.

    The first size, that of the batch, may be 0. `like` is its dtype, or a tensor that has its dtype and device.
    Raises BatchError that says what was found and what is needed.

    >>> rows = Batch(row={"features": torch.ones(2, 3, 5)})
    >>> check_leaf(rows, "row", "features", ("batch", "rows", 4), torch.float32)
    Traceback (most recent call last):
    rpfunc.errors.BatchError: batch: row leaf 'features' is (2, 3, 5) torch.float32; it must be (batch, rows, 4) \
torch.float32
    """
    leaves: Mapping[str, Any] = getattr(batch, part)
    dtype = like if isinstance(like, torch.dtype) else like.dtype
    needed = f"it must be ({', '.join(map(str, shape))}) {dtype}"
    if name not in leaves:
        there = ", ".join(map(repr, leaves)) or "none"
        raise BatchError(f"batch: lacks {part} leaf {name!r}, {needed}; of {part} leaves it has {there}")
    leaf: Any = leaves[name]
    if not isinstance(leaf, Tensor):
        raise BatchError(f"batch: {part} leaf {name!r} is a {type(leaf).__name__}; {needed}")
    if isinstance(like, Tensor) and leaf.device != like.device:
        raise BatchError(f"batch: {part} leaf {name!r} is on {leaf.device}; the parameters are on {like.device}")
    # under autocast, products choose their dtype themselves
    free = dtype.is_floating_point and leaf.is_floating_point() and _autocasts(leaf)
    if not _fits(leaf.shape, shape) or (leaf.dtype != dtype and not free):
        raise BatchError(f"batch: {part} leaf {name!r} is {tuple(leaf.shape)} {leaf.dtype}; {needed}")
    return leaf


def _autocasts(leaf: Tensor) -> bool:
    return not leaf.is_meta and torch.is_autocast_enabled(leaf.device.type)


def _fits(found: Iterable[int], needed: tuple[str | int, ...]) -> bool:
    sizes = list(found)
    return len(sizes) == len(needed) and all(
        size == need if isinstance(need, int) else size > 0 or place == 0
        for place, (size, need) in enumerate(zip(sizes, needed, strict=True))
    )
