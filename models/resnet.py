"""A small residual network on images: 3 x 3 convolutions, two to a block, each normalised.

Sources: residual networks (arXiv 1512.03385, section 4.2's family for small images, 1 x 1 shortcuts), batch norm
(arXiv 1502.03167), group norm (arXiv 1803.08494).
Shapes: B examples, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rpfunc import random
from rpfunc.batch import Batch
from rpfunc.checks import is_count
from rpfunc.errors import ModelError
from rpfunc.model import Form, Layer, Model, Params, accumulator_dtype
from rpfunc.models import checks
from rpfunc.stream import opaque

Normalise = Callable[[Any, str, Tensor, Batch], Tensor]
"""(a layer's parameters, its norm's name, x (B, C, H, W), batch) -> x normalised, scaled and shifted."""

Function = Callable[[Any, Any, Batch, Normalise], Tensor]
"""(parameters, x, batch, how to normalise) -> y."""


@dataclass(frozen=True)
class ResnetConfig:
    """The shape of a residual network. Raises ModelError listing every value that cannot work."""

    channels: int = 1
    """Of an image."""
    classes: int = 10
    """Different labels."""
    widths: tuple[int, ...] = (16, 32, 64)
    """Channels of each run of blocks; every run but the first halves height and width."""
    blocks: int = 1
    """In each run."""
    norm: Literal["batch", "frozen", "group"] = "group"
    """batch: by each channel's mean and variance over the whole batch, which must then be one microbatch; frozen: by
    those among the parameters, which have no gradient (see `freeze_statistics`, `statistics`); group: by those of
    groups of each example's channels."""
    groups: int = 4
    """Of channels, for group norm."""
    norm_epsilon: float = 1e-5
    """Added to the variance in every norm."""

    def __post_init__(self) -> None:
        problems = [
            *checks.counts({"channels": self.channels, "classes": self.classes, "groups": self.groups}),
            *checks.counts({"blocks": self.blocks}, most=checks.MOST_LAYERS),
            *checks.many("widths", self.widths, 1),
        ]
        if self.norm not in ("batch", "frozen", "group"):
            problems.append(f"norm is {self.norm!r}, it must be 'batch', 'frozen' or 'group'")
        whole = isinstance(self.widths, tuple | list) and all(map(is_count, (self.groups, *self.widths)))
        whole = whole and 1 <= self.groups <= checks.MOST_SIZE
        if self.norm == "group" and whole and any(width % self.groups for width in self.widths):
            problems.append(f"widths is {self.widths}, group norm needs multiples of groups, which is {self.groups}")
        problems += checks.positives({"norm_epsilon": self.norm_epsilon})
        if problems:
            raise ModelError.listing("resnet", problems)


def model(config: ResnetConfig) -> Model:
    """Returns layers `stem`, `block0` ..., `head`. Reads example leaf `images` (B, C, H, W); gives logits (B, 1, K).

    Images have the weights' dtype and device; others raise BatchError. Layers work on whole examples: a chunk size
    changes nothing. With norm="batch" a second microbatch is refused, by a ModelError: statistics over a part of the
    batch would be another function, which depends on the cut.
    """
    norm = {"batch": _batch_norm, "frozen": _frozen_norm, "group": _group_norm}[config.norm]

    def form(function: Function) -> Form:
        return opaque(lambda params, x, batch: function(params, x, batch, partial(norm, config)))

    return Model(tuple(Layer(name, form(function), name) for name, function in _functions(config).items()))


def init(config: ResnetConfig, key: random.Key, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns weights normal with variance 2 / inputs (He, arXiv 1502.01852), the head's with 1 / inputs; scales 1,
    shifts 0, frozen means 0 and variances 1. A block's second norm has scale 0, so that the block adds nothing yet.
    """

    def convolution(name: str, out: int, inputs: int, size: int) -> Tensor:
        drawn = random.normal(random.fold_in(key, name), (out, inputs, size, size), torch.float64)
        return (drawn * math.sqrt(2 / (inputs * size * size))).to(dtype)

    def norm(width: int, scale: float = 1.0) -> dict[str, Tensor]:
        values = {"scale": scale, "shift": 0.0}
        if config.norm == "frozen":
            values |= {"mean": 0.0, "variance": 1.0}
        return {name: torch.full((width,), value, dtype=dtype) for name, value in values.items()}

    params: dict[str, Any] = {
        "stem": {
            "weight": convolution("stem", config.widths[0], config.channels, 3),
            "norm": norm(config.widths[0]),
        }
    }
    for name, (inputs, out, stride) in _blocks(config).items():
        params[name] = {
            "first": convolution(f"{name}.first", out, inputs, 3),
            "first_norm": norm(out),
            "second": convolution(f"{name}.second", out, out, 3),
            "second_norm": norm(out, scale=0.0),
        }
        if inputs != out or stride != 1:
            shortcut = convolution(f"{name}.shortcut", out, inputs, 1)
            params[name] |= {"shortcut": shortcut, "shortcut_norm": norm(out)}
    drawn = random.normal(random.fold_in(key, "head"), (config.classes, config.widths[-1]), torch.float64)
    weight = (drawn / math.sqrt(config.widths[-1])).to(dtype)
    return params | {"head": {"weight": weight, "bias": torch.zeros(config.classes, dtype=dtype)}}


def statistics(path: str, leaf: Any) -> bool:
    """Returns whether a leaf is a frozen mean or variance: the mask for `frozen=` in `value_and_grad` and its kin."""
    del leaf
    return path.endswith(("norm.mean", "norm.variance"))


def freeze_statistics(config: ResnetConfig, params: Params, batch: Batch) -> tuple[ResnetConfig, dict[str, Any]]:
    """Returns (config, parameters) of norm="frozen" that give, on this batch, what those of norm="batch" give.

    What a model trained with norm="batch" is evaluated with: means and variances of its training images, say, found in
    one forward pass. Variances are divided by n, as in training. Raises ModelError for another norm.
    """
    if config.norm != "batch":
        raise ModelError(f"resnet: norm is {config.norm!r}; statistics are found for a model with norm='batch'")
    model(config).check(params)
    frozen: dict[str, Any] = {}
    x: Any = ()
    for layer, function in _functions(config).items():
        frozen[layer] = dict(params[layer])

        def keep(params: dict[str, Any], name: str, x: Tensor, batch: Batch, kept: Any = frozen[layer]) -> Tensor:
            mean, variance = _moments(x)
            kept[name] = {**params[name], "mean": mean, "variance": variance}
            return _frozen_norm(config, kept, name, x, batch)

        with torch.no_grad():
            x = function(params[layer], x, batch, keep)
    return replace(config, norm="frozen"), frozen


def _blocks(config: ResnetConfig) -> dict[str, tuple[int, int, int]]:
    """Returns by name each block's (channels in, channels out, stride)."""
    outs = [width for width in config.widths for _ in range(config.blocks)]
    strides = [2 if index and index % config.blocks == 0 else 1 for index in range(len(outs))]
    inputs = [config.widths[0], *outs]
    return {f"block{index}": shape for index, shape in enumerate(zip(inputs, outs, strides, strict=False))}


def _functions(config: ResnetConfig) -> dict[str, Function]:
    """Returns by name each layer's function, which is told how to normalise."""

    def stem(params: Any, x: Any, batch: Batch, normalise: Normalise) -> Tensor:
        del x
        weight = params["weight"]
        shape = ("batch", weight.shape[1], "height", "width")
        images = checks.check_leaf(batch, "example", "images", shape, weight)
        return F.relu(normalise(params, "norm", F.conv2d(images, weight, padding=1), batch))

    def block(stride: int, params: Any, x: Tensor, batch: Batch, normalise: Normalise) -> Tensor:
        hidden = F.conv2d(x, params["first"], stride=stride, padding=1)
        hidden = F.conv2d(F.relu(normalise(params, "first_norm", hidden, batch)), params["second"], padding=1)
        if "shortcut" in params:
            x = normalise(params, "shortcut_norm", F.conv2d(x, params["shortcut"], stride=stride), batch)
        return F.relu(x + normalise(params, "second_norm", hidden, batch))

    def head(params: Any, x: Tensor, batch: Batch, normalise: Normalise) -> Tensor:
        return F.linear(x.mean(dim=(2, 3)), params["weight"], params["bias"]).unsqueeze(1)

    blocks = {name: partial(block, stride) for name, (_, _, stride) in _blocks(config).items()}
    return {"stem": stem, **blocks, "head": head}


def _batch_norm(config: ResnetConfig, params: Any, name: str, x: Tensor, batch: Batch) -> Tensor:
    if batch.first_example > 0:
        raise ModelError(
            f"resnet: norm='batch' takes statistics over the whole batch, and was given a microbatch that begins at "
            f"example {batch.first_example}; use microbatches=1, or norm='group' or 'frozen', in which no example "
            "depends on another"
        )
    return _scaled(config, params[name], x, *_moments(x))


def _frozen_norm(config: ResnetConfig, params: Any, name: str, x: Tensor, batch: Batch) -> Tensor:
    return _scaled(config, params[name], x, params[name]["mean"].detach(), params[name]["variance"].detach())


def _group_norm(config: ResnetConfig, params: Any, name: str, x: Tensor, batch: Batch) -> Tensor:
    return F.group_norm(x, config.groups, params[name]["scale"], params[name]["shift"], config.norm_epsilon)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean and variance of each channel, float32 or wider."""
    variance, mean = torch.var_mean(x.to(accumulator_dtype(x.dtype)), dim=(0, 2, 3), correction=0)
    return mean, variance


def _scaled(config: ResnetConfig, params: dict[str, Tensor], x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    slope = params["scale"] * torch.rsqrt(variance + config.norm_epsilon)
    centred = x - mean[:, None, None]
    return (centred * slope[:, None, None] + params["shift"][:, None, None]).to(x.dtype)
