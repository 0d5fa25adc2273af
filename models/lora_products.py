"""A layer's products with adapted weights: how W acts as W + scale · B A without being it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rpfunc import random, tree
from rpfunc.batch import Batch
from rpfunc.errors import ModelError
from rpfunc.model import accumulator_dtype
from rpfunc.stream.accumulate import is_plain_look_up

SHAPE_ONLY = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cpu", "is_cuda", "layout")]
    + [Tensor.dim, Tensor.size, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.__len__]
    + [Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_tensor, Tensor.new_zeros]
)
"""What asks for a tensor's kind and not for its numbers."""


class Adapter(NamedTuple):
    """A weight (..., outputs, inputs), by the path that it is found at, with A (..., rank, inputs) and B."""

    path: str
    weight: Tensor
    a: Tensor
    b: Tensor


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns W + scale · B A, added in float32 or wider and rounded once, to W's dtype."""
    wide = torch.promote_types(accumulator_dtype(weight.dtype), a.dtype)
    return (weight.to(wide) + scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)


class Adapting(TorchFunctionMode):
    """While a layer's function runs, lets its adapted weights act as W + scale · B A.

    `F.linear(x, W)` gains scale · (x' Aᵀ) Bᵀ, where x' is x with dropout, drawn by example, row and feature under the
    batch's constant `key` and the weight's path; `F.embedding(ids, W)` and `W[ids]` gain scale · B[ids] A. Any other
    function gets the merged weight in W's place. A weight is known by its identity, so the layer's function must use
    the very tensors that it is given, in torch functions.
    """

    def __init__(self, adapters: Sequence[Adapter], scale: float, dropout: float, batch: Batch) -> None:
        self._adapters = {id(adapter.weight): adapter for adapter in adapters}
        self._scale, self._dropout, self._batch = scale, dropout, batch
        self._drops = dropout > 0.0 and "key" in batch.constant
        self._merged: dict[str, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in SHAPE_ONLY:
            return function(*args, **kwargs)
        if function is Tensor.__getitem__ and id(args[0]) in self._adapters and _are_rows(*args):
            table, output = self._adapters[id(args[0])], function(*args)
            return output + (self._scale * (table.b[args[1]] @ table.a)).to(output.dtype)
        if function in (F.linear, F.embedding):
            x, weight = (args[place] if len(args) > place else kwargs[name] for place, name in _OPERANDS)
            adapter = self._adapters.get(id(weight)) if id(x) not in self._adapters else None
            if adapter is not None and (function is F.linear or is_plain_look_up(*args[2:], **kwargs)):
                added = self._linear(x, adapter) if function is F.linear else F.embedding(x, adapter.b) @ adapter.a
                output = function(*args, **kwargs)
                return output + (self._scale * added).to(output.dtype)
        if any(id(leaf) in self._adapters for leaf in tree.leaves((args, kwargs))):
            args, kwargs = tree.map(self._act, (args, kwargs))
        return function(*args, **kwargs)

    def _linear(self, x: Tensor, adapter: Adapter) -> Tensor:
        if self._drops:
            batch = self._batch
            if x.dim() < 3 or x.shape[:2] != (batch.num_examples, batch.num_rows):
                raise ModelError(
                    f"lora: the input of {adapter.path} is of shape {tuple(x.shape)}; dropout is drawn by example and "
                    f"row, so it needs ({batch.num_examples}, {batch.num_rows}, ...), or dropout=0"
                )
            x = random.dropout(x, self._dropout, random.fold_in(batch.constant["key"], f"lora.{adapter.path}"), batch)
        return F.linear(F.linear(x.to(adapter.a.dtype), adapter.a), adapter.b)

    def _act(self, leaf: Any) -> Any:
        """Returns the merged weight in the place of an adapted one."""
        adapter = self._adapters.get(id(leaf))
        if adapter is None:
            return leaf
        if self._drops:
            raise ModelError(
                f"lora: {adapter.path} is used otherwise than in F.linear(x, weight) or F.embedding(ids, weight), so "
                "its adapter has no input to drop from; dropout=0 works"
            )
        if adapter.path not in self._merged:
            self._merged[adapter.path] = merged_weight(adapter.weight, adapter.a, adapter.b, self._scale)
        return self._merged[adapter.path]


def _are_rows(table: Tensor, place: Any) -> bool:
    """Returns whether `table[place]` gives, for each of many whole numbers, that row of a table."""
    return table.dim() == 2 and isinstance(place, Tensor) and place.dtype in (torch.int64, torch.int32)


_OPERANDS = ((0, "input"), (1, "weight"))
