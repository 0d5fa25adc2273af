"""Low-rank adapters: every chosen weight W acts as W + scale · B A, and only A and B are trained.

Sources: LoRA (arXiv 2106.09685, section 4); the rank-stabilised scale (arXiv 2312.03732, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rpfunc import random, tree
from rpfunc.checks import shown
from rpfunc.errors import ModelError
from rpfunc.model import Form, Layer, Model, Params, accumulator_dtype
from rpfunc.models import checks
from rpfunc.models.lora_products import Adapter, Adapting, merged_weight
from rpfunc.models.lora_targets import Weight, matching, weights, without_rows
from rpfunc.stream import Attending, Bidirectional, Opaque, Recurrent, RowWise

PREFIX = "lora_"
"""What the names of subtrees with adapters begin with; the layer's name follows."""

MOST_RANK = 65_536
"""The largest rank: no weight of a known model has a rank above it."""

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
        problems = [
            *checks.counts({"rank": self.rank}, most=MOST_RANK),
            *checks.positives({"alpha": self.alpha}),
            *checks.rates({"dropout": self.dropout}),
            *checks.flags({"rank_stabilised": self.rank_stabilised}),
        ]
        patterns = isinstance(self.targets, tuple | list) and all(isinstance(each, str) for each in self.targets)
        if not patterns or not self.targets:
            found = shown(self.targets)
            problems.insert(0, f"targets is {found}, it must be a tuple of patterns, such as ('query', 'value')")
        if problems:
            raise ModelError.listing("lora", problems)
        object.__setattr__(self, "targets", tuple(self.targets))

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return float(self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank))


@dataclass(frozen=True)
class AdaptedLayer(Layer):
    """A layer with adapters, and what it is without them."""

    plain: Layer = field(kw_only=True)
    config: LoraConfig = field(kw_only=True)
    paths: tuple[str, ...] = field(kw_only=True)
    """Of its weights with adapters."""


def adapt(model: Model, params: Params, config: LoraConfig, key: random.Key) -> tuple[Model, dict[str, Any]]:
    """Returns (model, params) with new adapters, which change no output yet: A normal of variance 1 / inputs, B zero.

    A layer L with adapters reads one more subtree, "lora_L". The other subtrees are those of `params`, not copies: they
    may be memory-mapped. With `frozen=lora.frozen` gradients, optimizer state and updates are the adapters' alone.
    Where a layer uses W in `F.linear`, `F.embedding` or `W[ids]`, neither W + B A nor a gradient of W's shape is made;
    any other use reads a merged weight, made anew in each call, and has no dropout. Adapters are float32 or wider.
    Raises ModelError for a target that matches nothing, naming near paths, and with dropout for weights that meet no
    rows (B, T, ...) in `F.linear`: those of more than two dimensions, and experts with their router.

    >>> from rpfunc.models import decoder
    >>> config = decoder.DecoderConfig(layers=1)
    >>> plain = decoder.init(config, random.key(0))
    >>> model, params = adapt(decoder.model(config), plain, LoraConfig(("query", "projection")), random.key(1))
    >>> sorted(split(params)[1])
    ['lora_block0', 'lora_head']
    """
    if not isinstance(config, LoraConfig) or not isinstance(key, random.Key):
        kinds = f"{type(config).__name__} and {type(key).__name__}"
        raise ModelError(f"lora: adapt was given a {kinds}; it needs a LoraConfig and a key such as random.key(0)")
    found = weights(model, params)
    paths = matching(found, config.targets)
    if config.dropout and (problems := without_rows(paths, found)):
        raise ModelError.listing("lora", problems)
    adapters = {}
    for path in paths:
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

    As `adapt`; `config.targets` is not read. Adapters go to their weight's device, in float32 or wider. Raises
    ModelError listing every path, shape and dtype that does not fit.
    """
    found = weights(model, params)
    _check(model, params, found, adapters, config)
    layers, subtrees = [], {}
    for layer in model.layers:
        places = {path: found[path].place for path in adapters if found[path].layer == layer.name}
        if places:
            name = PREFIX + layer.name
            subtrees[name] = {path: _widened(adapters[path], found[path].tensor.device) for path in places}
            reads, form = {"plain": layer.reads, "adapters": name}, _adapted_form(layer.form, places, config)
            layer = AdaptedLayer(layer.name, form, reads, plain=layer, config=config, paths=(*places,))
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


def adapters_of(model: Model, params: Params) -> dict[str, Mapping[str, Tensor]]:
    """Returns A and B of every adapter by its weight's path. Raises ModelError where `params` are not the model's."""
    adapted = [layer for layer in model.layers if isinstance(layer, AdaptedLayer)]
    names = [PREFIX + layer.name for layer in adapted]
    advice = "give those that lora.adapt, lora.attach or lora_peft.load returned with the model"
    lacking = [name for name in names if name not in params]
    if lacking:
        raise ModelError(f"lora: params lacks the adapters {', '.join(map(repr, lacking))}; {advice}")
    model.check(params)
    problems = []
    plain = tuple(layer.plain if isinstance(layer, AdaptedLayer) else layer for layer in model.layers)
    found, adapters = weights(Model(plain), split(params)[0]), {}
    for layer, name in zip(adapted, names, strict=True):
        parts = params[name]
        problems += [f"params has no adapter of {path!r}; {advice}" for path in layer.paths if path not in parts]
        problems += [f"the model has no adapter of {path!r}; {advice}" for path in parts if path not in layer.paths]
        for path in (path for path in layer.paths if path in parts):
            adapters[path] = parts[path]
            problems += _misfits(path, found[path].tensor, parts[path], layer.config.rank)
    if problems:
        raise ModelError.listing("lora", problems)
    return adapters


def merge(model: Model, params: Params) -> tuple[Model, dict[str, Any]]:
    """Returns (model, params) without adapters and with the same outputs: each weight W is W + scale · B A.

    The sum is rounded once, from float32 or wider, to W's dtype. Nothing is written to: to unmerge is to go back to
    `params`, whose weights are what they were, bit by bit (W + D - D would not be). Other weights are shared.
    Layers that shared a subtree and now differ in it are untied: the first keeps the subtree's name, a later one gets
    one of its own, the layer's (a tied head's is "head"). Raises ModelError where the parameters are not this model's.
    """
    adapters_of(model, params)
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


def _check(model: Model, params: Params, found: Mapping[str, Weight], adapters: Any, config: LoraConfig) -> None:
    if not isinstance(adapters, Mapping) or not adapters:
        kind = "empty" if isinstance(adapters, Mapping) else f"a {type(adapters).__name__}"
        raise ModelError(f"lora: adapters is {kind}, it must be a dict of A and B by path")
    layers = {layer.name: layer for layer in model.layers}
    problems = [f"the model has no weight {path!r}" for path in adapters if path not in found]
    problems += [f"params has a subtree {name!r} already" for name in params if name.startswith(PREFIX)]
    for path in (path for path in adapters if path in found):
        name, place, weight = found[path]
        problems += _misfits(path, weight, adapters[path], config.rank)
        leaves = tree.leaves(layers[name].select(params))
        if any(leaf is weight for other, leaf in enumerate(leaves) if other != place):
            problems.append(f"layer {name!r} reads {path} twice, so its uses cannot be told apart")
        if not isinstance(layers[name].form, FORMS):
            kind = type(layers[name].form).__name__
            problems.append(f"layer {name!r} has a {kind} as its form, adapters need one of rpfunc.stream")
    if problems:
        raise ModelError.listing("lora", list(dict.fromkeys(problems)))


def _misfits(path: str, weight: Tensor, part: Any, rank: int) -> list[str]:
    """Returns, in words, what keeps A and B from being an adapter of this weight."""
    if not isinstance(part, Mapping) or sorted(map(str, part)) != ["A", "B"]:
        found = sorted(map(str, part)) if isinstance(part, Mapping) else f"a {type(part).__name__}"
        return [f"adapter {path} is {found}, it must be a dict of A and B"]
    kinds = {name: leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__ for name, leaf in part.items()}
    wrong = [name for name, leaf in part.items() if not isinstance(leaf, Tensor) or not leaf.is_floating_point()]
    if wrong:
        return [f"adapter {path} has {name} of {kinds[name]}, it must be a floating-point tensor" for name in wrong]
    *lead, outputs, inputs = weight.shape
    wanted = {"A": (*lead, rank, inputs), "B": (*lead, outputs, rank)}
    shapes = {name: tuple(tensor.shape) for name, tensor in part.items()}
    if shapes == wanted:
        return []
    return [f"adapter {path} has shapes {shapes}, its weight and rank {rank} need {wanted}"]


def _widened(part: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """Returns A and B in one dtype that holds both, float32 or wider, and on a device, if one is given."""
    dtype = accumulator_dtype(torch.promote_types(part["A"].dtype, part["B"].dtype))
    return {name: tensor.to(device=device, dtype=dtype) for name, tensor in part.items()}


def _adapted_form(form: Any, places: Mapping[str, int], config: LoraConfig) -> Form:
    functions = {part.name: getattr(form, part.name) for part in fields(form)}
    adapted = {name: _adapted(each, places, config) for name, each in functions.items() if callable(each)}
    changed: Form = replace(form, **adapted)
    return changed


def _adapted(function: Callable[..., Any], places: Mapping[str, int], config: LoraConfig) -> Callable[..., Any]:
    def adapted(params: Any, *others: Any) -> Any:
        leaves = tree.leaves(params["plain"])
        # widened here too: a tree that somebody has cast to 16 bits still acts as it merges
        parts = [(path, leaves[place], _widened(params["adapters"][path])) for path, place in places.items()]
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
