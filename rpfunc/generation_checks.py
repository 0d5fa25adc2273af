"""What `generate` refuses before any work: options, prompts and parameters that cannot work."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from rpfunc import random, tree
from rpfunc.checks import is_count, shown
from rpfunc.errors import BatchError, ModelError
from rpfunc.model import Model, Params
from rpfunc.stream.chunk_major import looking_ahead

MOST_TOKENS = 10_000_000
"""The most tokens in one call: buffers for all are made at its start."""

MOST_COUNT = 2**62
"""The largest number of anything else."""


def count(name: str, value: Any, least: int, most: int, example: int) -> str | None:
    """Returns what is wrong unless `value` is a whole number from `least` to `most`."""
    if is_count(value) and least <= value <= most:
        return None
    bound = f"at least {least}" if not (is_count(value) and value > most) else f"at most {most}"
    return f"{name} is {shown(value)}; it must be a whole number of {bound}, for example {example}"


def number(name: str, value: Any, low: float, high: float, words: str, example: float) -> str | None:
    """Returns what is wrong unless `value` is a number from `low` to `high`, which `words` say."""
    if isinstance(value, Real) and not isinstance(value, bool):
        exact = value if isinstance(value, int) else float(value)  # a float32 of numpy's would round the bounds
        if low <= exact <= high:
            return None
    return f"{name} is {shown(value)}; it must be {words}, for example {example}"


def draws_with(key: Any) -> str | None:
    """Returns what is wrong unless `key` is a random key or None."""
    if key is None or isinstance(key, random.Key):
        return None
    return f"key is {shown(key)}; it must be a random key, for example rpfunc.random.key(0)"


def stops(tokens: Any) -> str | None:
    """Returns what is wrong unless `tokens` is a collection of whole numbers from 0."""
    if isinstance(tokens, Collection) and all(is_count(token) and 0 <= token <= MOST_COUNT for token in tokens):
        return None
    return f"stop is {shown(tokens)}; it must be a collection of tokens, for example (0,)"


def check_model(model: Any, params: Params) -> None:
    """Raises ModelError for layers that look ahead, and naming every parameter that is not finite or not there.

    A number that is not finite may vanish on its way: attention gives zeros for a query of NaN. Cost: reads every
    parameter once, without a copy.
    """
    if not isinstance(model, Model):
        raise ModelError(f"generate: model is a {type(model).__name__}, it must be a rpfunc.Model")
    model.check(params)
    problems = looking_ahead(model.layers)
    if problems:
        raise ModelError.listing("generate needs row-wise, causal or recurrent layers", problems)
    named = list(zip(tree.paths(dict(params)), tree.leaves(dict(params)), strict=True))
    problems = [
        f"{path} is on the meta device, it has no numbers; load it first" for path, leaf in named if leaf.is_meta
    ]
    problems = problems or [f"{path} has numbers that are not finite" for path, leaf in named if not _is_finite(leaf)]
    if problems:
        raise ModelError.listing("generate: params", problems)


def texts(prompts: Any, device: torch.device) -> list[Tensor]:
    """Returns the prompts as (n,) int64 each. Raises BatchError listing every one that is no text of whole numbers."""
    if not isinstance(prompts, Iterable) or (isinstance(prompts, Tensor) and not prompts.dim()):
        raise BatchError(f"generate: prompts is a {type(prompts).__name__}, it must be a list of prompts")
    found, problems = [], []
    for index, prompt in enumerate(prompts):
        text = _text(prompt, device)
        if isinstance(text, str):
            problems.append(f"prompt {index} is {text}, needs a list of integers")
        elif text.dim() != 1 or len(text) == 0:
            problems.append(f"prompt {index} has shape {tuple(text.shape)}, needs (n,) with n at least 1")
        elif text.is_floating_point() or text.is_complex() or text.dtype == torch.bool:
            problems.append(f"prompt {index} is {text.dtype}, needs integers")
        else:
            found.append(text.long())
    if not found and not problems:
        problems = ["there is none, at least one is needed"]
    if problems:
        raise BatchError.listing("generate: prompts", problems)
    return found


def logits_of(output: Any) -> Tensor:
    """Returns the logits (B, T, V) of a model's output. Raises ModelError where it has none."""
    logits = output.get("logits") if isinstance(output, Mapping) else output
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() != 3 or not logits.numel():
        shape = f"{tuple(logits.shape)} {logits.dtype}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ModelError(
            f"generate: the model gives {shape}; it must give floating-point logits (batch, rows, vocabulary), or a "
            'dict that has them as "logits"'
        )
    return logits


def _text(prompt: Any, device: torch.device) -> Tensor | str:
    """Returns the prompt as a tensor, or in words what it is instead."""
    tokens = isinstance(prompt, Collection) and not isinstance(prompt, str | bytes | Mapping)
    if not tokens or (not isinstance(prompt, Tensor) and any(isinstance(token, bool) for token in prompt)):
        return shown(prompt)
    try:
        return torch.as_tensor(prompt, device=device)
    except (TypeError, ValueError, RuntimeError) as error:  # numbers beyond 64 bits, lists in lists
        return f"{shown(prompt)} ({str(error).splitlines()[0]})"


def _is_finite(leaf: Tensor) -> bool:
    if not leaf.numel():
        return True
    leaf = leaf.detach()
    ends = torch.aminmax(leaf.float() if leaf.itemsize == 1 else leaf)
    return math.isfinite(ends.min) and math.isfinite(ends.max)
