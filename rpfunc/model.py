"""Layers and models: pure functions over explicit parameter subtrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.errors import ModelError
from rpfunc.sums import Sum, Sums, add, whole

Params = Mapping[str, Any]
"""A model's parameters: named subtrees, each a pytree of tensors."""

Flat = tuple[Tensor, ...]
"""The floating-point leaves of a pytree, complex ones too, in order: cotangents have this form."""


class Form(Protocol):
    """How a layer's output rows depend on its input rows; see `rpfunc.stream` for the forms there are."""

    def full(self, params: Any, x: Any, batch: Batch) -> Any:
        """Returns the layer's output for whole rows."""

    def forward(self, params: Any, x: Any, batch: Batch, chunk: int) -> Any:
        """Returns the same, working on `chunk` rows at a time."""

    def backward(
        self, params: Any, x: Any, batch: Batch, chunk: int, cotangent: Flat, grads: Sums | None
    ) -> tuple[Flat, Sums]:
        """Returns (dx, grads + dparams), `chunk` rows at a time; `cotangent` and `grads` are donated."""

    def precompose(self, function: Callable[[Any], Any]) -> Form:
        """Returns the form that applies `function` to its parameters first."""


@dataclass(frozen=True)
class Layer:
    """A named pure function and the parameter subtrees that it reads: the smallest unit a plan can cut at.

    `reads` is a pytree of subtree names. The function gets the same pytree with each name replaced by that subtree:
    `reads="block3"` hands it one subtree, `reads={"norm": "final_norm", "head": "embedding"}` a dict of two, `()` none.
    Layers that name the same subtree share it, and its gradient is the sum over them.
    """

    name: str
    form: Form
    reads: Any = ()

    @property
    def subtrees(self) -> tuple[str, ...]:
        """The names in `reads`, in leaf order."""
        return tuple(tree.leaves(self.reads))

    def select(self, params: Params) -> Any:
        """Returns what the layer's function gets as its parameters."""
        return tree.map(lambda name: params[name], self.reads)

    def __call__(self, params: Params, x: Any, batch: Batch) -> Any:
        """Returns the layer's output for whole rows."""
        return self.form.full(self.select(params), x, batch)


@dataclass(frozen=True)
class Model:
    """A run of layers. The first gets x = (); the last gives the output that an objective scores.

    layers: any iterable of them; it is held as a tuple.
    Raises ModelError for no layer, for two layers of one name, and for a `reads` that is not made of names.
    """

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        found: Any = self.layers
        if not isinstance(found, Iterable):
            raise ModelError(f"model: layers is a {type(found).__name__}, needs several Layers, as in Model((layer,))")
        object.__setattr__(self, "layers", tuple(found))
        odd = [layer for layer in self.layers if not isinstance(layer, Layer)]
        if odd:
            raise ModelError(f"model: found a {type(odd[0]).__name__} among the layers, needs a Layer")
        names = [layer.name for layer in self.layers]
        problems = [
            f"layer {name!r} appears {names.count(name)} times" for name in sorted(set(names)) if names.count(name) > 1
        ]
        problems += [
            f"layer {layer.name!r} reads {found!r}, which is no subtree name (a string)"
            for layer in self.layers
            for found in layer.subtrees
            if not isinstance(found, str)
        ]
        problems += [
            f"layer {layer.name!r} has a {type(layer.form).__name__} as its form, needs one such as rowwise(function)"
            for layer in self.layers
            if not hasattr(layer.form, "full")
        ]
        if not self.layers:
            problems.append("has no layer, needs at least one")
        if problems:
            raise ModelError.listing("model", problems)

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    def __call__(self, params: Params, batch: Batch) -> Any:
        """Returns the last layer's output for whole rows."""
        x: Any = ()
        for layer in self.layers:
            x = layer(params, x, batch)
        return x

    def check(self, params: Params) -> None:
        """Raises ModelError naming every subtree that is missing or that no layer reads, and every leaf that is no
        floating-point tensor.
        """
        if not isinstance(params, Mapping):
            raise ModelError(f"model: params is a {type(params).__name__}, needs a dict of subtrees by name")
        wanted = {name for layer in self.layers for name in layer.subtrees}
        problems = [f"params lacks subtree {name!r}" for name in sorted(wanted - params.keys())]
        problems += [f"no layer reads subtree {name!r} of params" for name in sorted(params.keys() - wanted, key=repr)]
        for path, leaf in zip(tree.paths(dict(params)), tree.leaves(dict(params)), strict=True):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                found = f"{leaf.dtype} tensor" if isinstance(leaf, Tensor) else type(leaf).__name__
                advice = "; hold torch.view_as_real of it" if isinstance(leaf, Tensor) and leaf.is_complex() else ""
                problems.append(f"params leaf {path} is a {found}, needs a floating-point tensor{advice}")
            elif leaf.layout != torch.strided:
                problems.append(f"params leaf {path} is {leaf.layout}, needs a dense tensor")
        if problems:
            raise ModelError.listing("model", problems)

    def sum_grad(self, name: str, grads: Sequence[Sequence[Sums]], params: Params) -> Any:
        """Returns the gradient of a subtree, with its structure: the sum over the layers that read it, in their order.

        grads  for each layer, the sums of its gradients, which are added first; none counts as zero; all are donated
        Sums are float32 or wider, and added in place. Shared subtrees meet only here, so that no schedule changes the
        order of their sum. A leaf that is no tensor (frozen) has None.
        """
        leaves, structure = tree.flatten(params[name])
        total: list[Sum] | None = None
        for layer, parts in zip(self.layers, grads, strict=True):
            stop = 0
            for read in layer.subtrees if parts else ():
                start, stop = stop, stop + sum(isinstance(leaf, Tensor) for leaf in tree.leaves(params[read]))
                if read == name:
                    first, *rest = (list(part[start:stop]) for part in parts)
                    for part in rest:
                        first = list(map(add, first, part))
                    total = first if total is None else list(map(add, total, first))
        trained = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if total is None:
            total = [torch.zeros_like(leaf, dtype=accumulator_dtype(leaf.dtype)) for leaf in trained]
        found = map(whole, total, trained)
        return tree.unflatten(structure, [next(found) if isinstance(leaf, Tensor) else None for leaf in leaves])


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which gradients of `dtype` parameters are summed: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)
