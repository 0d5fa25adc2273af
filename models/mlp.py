"""A multi-layer perceptron, applied to each row on its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rpfunc import random
from rpfunc.batch import Batch
from rpfunc.errors import ModelError
from rpfunc.model import Layer, Model
from rpfunc.models import checks
from rpfunc.stream import rowwise


@dataclass(frozen=True)
class MlpConfig:
    """Widths from input to output (at least two) and what stands between two layers.

    Raises ModelError listing every value that cannot work.
    """

    widths: tuple[int, ...] = (64, 64, 10)
    activation: Literal["relu", "square", "tanh"] = "relu"

    def __post_init__(self) -> None:
        problems = checks.many("widths", self.widths, 2)
        if self.activation not in sorted(_ACTIVATIONS):
            problems.append(f"activation is {self.activation!r}, it must be one of {sorted(_ACTIVATIONS)}")
        if problems:
            raise ModelError.listing("mlp", problems)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "square": torch.square, "tanh": torch.tanh}


def model(config: MlpConfig) -> Model:
    """Returns layers `linear0` ...; reads row leaf `features` (B, T, widths[0]), gives (B, T, widths[-1]).

    Raises BatchError for features of another shape, dtype or device than the weights'.
    """
    last = len(config.widths) - 2
    return Model(
        tuple(Layer(f"linear{i}", rowwise(_layer(config, i, i == last)), f"linear{i}") for i in range(last + 1))
    )


def init(config: MlpConfig, key: random.Key, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns weights (out, in), normal with variance 2 / in (He, arXiv 1502.01852), and zero biases."""
    params = {}
    for index, (inputs, out) in enumerate(pairwise(config.widths)):
        drawn = random.normal(random.fold_in(key, index), (out, inputs), torch.float64)
        params[f"linear{index}"] = {
            "weight": (drawn * math.sqrt(2 / inputs)).to(dtype),
            "bias": torch.zeros(out, dtype=dtype),
        }
    return params


def _layer(config: MlpConfig, index: int, last: bool) -> Any:
    activation = _ACTIVATIONS[config.activation]

    def layer(params: dict[str, Tensor], x: Any, batch: Batch) -> Tensor:
        weight = params["weight"]
        if index == 0:
            x = checks.check_leaf(batch, "row", "features", ("batch", "rows", weight.shape[1]), weight)
        output = F.linear(x, weight, params["bias"])
        return output if last else activation(output)

    return layer
