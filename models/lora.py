"""Low-rank adapters: every chosen weight W acts as W + scale · B A, and only A and B are trained.

Sources: LoRA (arXiv 2106.09685, section 4); the rank-stabilised scale (arXiv 2312.03732, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

from torch import Tensor

from rpfunc import random, tree
from rpfunc.errors import ModelError
from rpfunc.model import Form, Layer, Model, Params, accumulator_dtype
from rpfunc.models.lora_products import Adapter, Adapting, merged_weight
from rpfunc.models.lora_targets import matching, weights
from rpfunc.stream import Attending, Bidirectional, Opaque, Recurrent, RowWise

PREFIX = "lora_"
"""What the names of subtrees with adapters begin with; the layer's name follows."""

FORMS = (RowWise, Attending, Bidirectional, Recurrent, Opaque)
"""Forms whose functions take parameters first and the batch last."""


@dataclass(frozen=True)
class LoraConfig:
    """Which weights get adapters, and of what kind. Raises ModelError listing every value that cannot work.

    A weight's path is its layer's name and its place in what the layer reads: "block0.attention.query", "embedding",
    and "head.projection" whether or not the head is tied. A target is a pattern (`fnmatch`: * ? [seq]) of a path or of
    its end after a dot: "query" and "attention.*" match in all blocks, "block[01].mlp.*" in two.
    """

    targets: tuple[str, ...]
    """Patterns of the weights that get adapters; each must match one. Leaves of one dimension are no weights."""
    rank: int = 8
    """Rows of A and columns of B."""
    alpha: float = 16.0
    """The scale is alpha / rank."""
    dropout: float = 0.0
    """On an adapter's input; active where the batch has a constant `key`. Tables that are looked up in have none."""
    rank_stabilised: bool = False
    """The scale is alpha / sqrt(rank) instead."""

    def __post_init__(self) -> None:
        problems = []
        if isinstance(self.targets, str) or not self.targets:
            problems.append(f"targets is {self.targets!r}, it must be a tuple of patterns, such as ('query', 'value')")
        if self.rank < 1:
            problems.append(f"rank is {self.rank}, it must be at least 1")
        if not 0.0 < self.alpha < math.inf:
            problems.append(f"alpha is {self.alpha}, it must be positive and finite")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}, it must be at least 0 and below 1")
        if problems:
            raise ModelError.listing("lora", problems)

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


@dataclass(frozen=True)
class AdaptedLayer(Layer):
    """A layer with adapters, and what it is without them."""

    plain: Layer = field(kw_only=True)
    config: LoraConfig = field(kw_only=True)


def adapt(model: Model, params: Params, config: LoraConfig, key: random.Key) -> tuple[Model, dict[str, Any]]:
    """Returns (model, params) with new adapters, which change no output yet: A normal of variance 1 / inputs, B zero.

    A layer L with adapters reads one more subtree, "lora_L". The other subtrees are those of `params`, not copies: they
    may be memory-mapped. With `frozen=lora.frozen` gradients, optimizer state and updates are the adapters' alone.
    Where a layer uses W in `F.linear` or `F.embedding`, neither W + B A nor a gradient of W's shape is made; any other
    use reads a merged weight, made anew in each call, and has no dropout. Adapters are float32 or wider.
    Raises ModelError for a target that matches nothing, naming near paths.

    >>> from rpfunc.models import decoder
    >>> config = decoder.DecoderConfig(layers=1)
    >>> plain = decoder.init(config, random.key(0))
    >>> model, params = adapt(decoder.model(config), plain, LoraConfig(("query", "projection")), random.key(1))
    >>> sorted(split(params)[1])
    ['lora_block0', 'lora_head']
    """
    found = weights(model, params)
    adapters = {}
    for path in matching(found, config.targets):
        weight = found[path].tensor
        *lead, outputs, inputs = weight.shape
        drawn = random.normal(random.fold_in(key, path), (*lead, config.rank, inputs))
        a = (drawn / math.sqrt(inputs)).to(weight.device, accumulator_dtype(weight.dtype))
        adapters[path] = {"A": a, "B": a.new_zeros(*lead, outputs, config.rank)}
    return attach(model, params, adapters, config)


def attach(
    model: Model, params: Params, adapters: Mapping[str, Mapping[str, Tensor]], config: LoraConfig
) -> tuple[Model, dict[str, Any]]:
    """Returns (model, params) with the given adapters: by path, A (..., rank, inputs) and B (..., outputs, rank).

    As `adapt`; `config.targets` is not read. Raises ModelError listing every path and shape that does not fit.
    """
    _check(model, params, adapters, config)
    found, layers, subtrees = weights(model, params), [], {}
    for layer in model.layers:
        places = {path: found[path].place for path in adapters if found[path].layer == layer.name}
        if places:
            name = PREFIX + layer.name
            subtrees[name] = {path: dict(adapters[path]) for path in places}
            reads, form = {"plain": layer.reads, "adapters": name}, _adapted_form(layer.form, places, config)
            layer = AdaptedLayer(layer.name, form, reads, plain=layer, config=config)
        layers.append(layer)
    return replace(model, layers=tuple(layers)), {**params, **subtrees}


def frozen(path: str, leaf: Any) -> bool:
    """Returns whether a leaf is none of an adapter's: the mask for `frozen=` in `value_and_grad` and its kin."""
    del leaf
    return not path.startswith(PREFIX)


def split(params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (the subtrees without adapters, those of the adapters): what was there before, and what is to be saved.

    Put together again with `{**plain, **adapters}`.
    """
    plain = {name: subtree for name, subtree in params.items() if not name.startswith(PREFIX)}
    return plain, {name: subtree for name, subtree in params.items() if name not in plain}


def merge(model: Model, params: Params) -> tuple[Model, dict[str, Any]]:
    """Returns (model, params) without adapters and with the same outputs: each weight W is W + scale · B A.

    The sum is rounded once, from float32 or wider, to W's dtype. Nothing is written to: to unmerge is to go back to
    `params`, whose weights are what they were, bit by bit (W + D - D would not be). Other weights are shared.
    Layers that shared a subtree and now differ in it are untied: the first keeps the subtree's name, a later one gets
    one of its own, the layer's (a tied head's is "head").
    """
    layers: list[Layer] = []
    merged: dict[str, Any] = {}
    for layer in model.layers:
        plain, subtrees = _merged_subtrees(layer, params)
        names = []
        for name, subtree in zip(plain.subtrees, subtrees, strict=True):
            if name in merged and not _same_leaves(merged[name], subtree):
                taken = merged.keys() | params.keys()
                name = next(other for other in (plain.name, f"{plain.name}_{name}") if other not in taken)
            merged[name] = subtree
            names.append(name)
        layers.append(replace(plain, reads=tree.unflatten(tree.flatten(plain.reads)[1], names)))
    return replace(model, layers=tuple(layers)), merged


def _check(model: Model, params: Params, adapters: Mapping[str, Mapping[str, Tensor]], config: LoraConfig) -> None:
    found, layers = weights(model, params), {layer.name: layer for layer in model.layers}
    problems = [f"the model has no weight {path!r}" for path in adapters if path not in found]
    problems += [f"params has a subtree {name!r} already" for name in params if name.startswith(PREFIX)]
    for path in (path for path in adapters if path in found):
        name, place, weight = found[path]
        *lead, outputs, inputs = weight.shape
        wanted = {"A": (*lead, config.rank, inputs), "B": (*lead, outputs, config.rank)}
        shapes = {part: tuple(tensor.shape) for part, tensor in adapters[path].items()}
        if shapes != wanted:
            problems.append(f"adapter {path} has shapes {shapes}, its weight and rank {config.rank} need {wanted}")
        leaves = tree.leaves(layers[name].select(params))
        if any(leaf is weight for other, leaf in enumerate(leaves) if other != place):
            problems.append(f"layer {name!r} reads {path} twice, so its uses cannot be told apart")
        if not isinstance(layers[name].form, FORMS):
            kind = type(layers[name].form).__name__
            problems.append(f"layer {name!r} has a {kind} as its form, adapters need one of rpfunc.stream")
    if problems:
        raise ModelError.listing("lora", list(dict.fromkeys(problems)))


def _adapted_form(form: Any, places: Mapping[str, int], config: LoraConfig) -> Form:
    functions = {part.name: getattr(form, part.name) for part in fields(form)}
    adapted = {name: _adapted(each, places, config) for name, each in functions.items() if callable(each)}
    changed: Form = replace(form, **adapted)
    return changed


def _adapted(function: Callable[..., Any], places: Mapping[str, int], config: LoraConfig) -> Callable[..., Any]:
    def adapted(params: Any, *others: Any) -> Any:
        leaves = tree.leaves(params["plain"])
        parts = [(path, leaves[place], params["adapters"][path]) for path, place in places.items()]
        adapters = [Adapter(path, weight, part["A"], part["B"]) for path, weight, part in parts]
        with Adapting(adapters, config.scale, config.dropout, others[-1]):
            return function(params["plain"], *others)

    return adapted


def _merged_subtrees(layer: Layer, params: Params) -> tuple[Layer, list[Any]]:
    """Returns the layer without adapters, and what each subtree that it then reads becomes."""
    if not isinstance(layer, AdaptedLayer):
        return layer, [params[name] for name in layer.subtrees]
    plain = layer.plain
    leaves = tree.leaves(plain.select(params))
    found = weights(Model((plain,)), {name: params[name] for name in plain.subtrees})
    for path, part in params[PREFIX + plain.name].items():
        place = found[path].place
        leaves[place] = merged_weight(leaves[place], part["A"], part["B"], layer.config.scale)
    subtrees, remaining = [], iter(leaves)
    for name in plain.subtrees:
        old, structure = tree.flatten(params[name])
        subtrees.append(tree.unflatten(structure, list(islice(remaining, len(old)))))
    return plain, subtrees


def _same_leaves(left: Any, right: Any) -> bool:
    """Returns whether two subtrees of one structure have the very same leaves."""
    return all(one is other for one, other in zip(tree.leaves(left), tree.leaves(right), strict=True))
