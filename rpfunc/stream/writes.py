"""Writes in place to what others read too, found by tensors' version counters. Source: own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import ModelError
from rpfunc.stream.freeze import Frozen

T = TypeVar("T")

ADVICE = (
    "which others read and which no longer has the values that it was given with; make a new tensor, as x * 2 does and "
    "x.mul_(2) does not, or write to a clone"
)


class Counters:
    """How often each tensor of a pytree had been written to when this was made; inference tensors do not count.

    Views share a counter: a write to any part of a tensor counts for all of it, whoever does it.
    Cost: well below 10 µs for 10 leaves of any size.
    """

    def __init__(self, structured: Any) -> None:
        self._tensors: list[Tensor] = []
        with torch._C.DisableTorchFunction():  # no mode shall take it for a use of the tensors
            _gather(structured, self._tensors)
            self._before = [tensor._version for tensor in self._tensors]

    def changed(self) -> set[int]:
        """Returns the ids of those that have been written to since."""
        with torch._C.DisableTorchFunction():
            now = [tensor._version for tensor in self._tensors]
        if now == self._before:
            return set()
        triples = zip(self._tensors, self._before, now, strict=True)
        return {id(tensor) for tensor, before, after in triples if before != after}


def reading(name: str, value: Any, function: Callable[..., T], *arguments: Any) -> T:
    """Returns function(*arguments). Raises ModelError if it writes in place to `value`, called `name`."""
    counters = Counters(value)
    result = function(*arguments)
    if counters.changed():
        raise ModelError(f"layer: has written in place to {name}, {ADVICE}")
    return result


def _gather(structured: Any, found: list[Tensor]) -> None:
    # by hand: optree, which knows every container, would take longer than all the rest
    if isinstance(structured, Tensor):
        if not structured.is_inference():
            found.append(structured)
    elif isinstance(structured, dict):
        for value in structured.values():
            _gather(value, found)
    elif isinstance(structured, tuple | list):
        for value in structured:
            _gather(value, found)
    elif isinstance(structured, Frozen):
        _gather(structured.tensor, found)
    else:
        for leaf in tree.leaves(structured):
            if leaf is not structured:
                _gather(leaf, found)
