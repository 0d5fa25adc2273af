"""What does not fit in a call of `attend`, in words: found from shapes and kinds alone, before any work."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

import torch
from torch import Tensor

from rpfunc.checks import is_count, is_real, shown


def misfits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: int | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    visible: Tensor | None,
    sinks: Tensor | None,
    soft_cap: float | None,
    scale: float | None,
) -> list[str]:
    """Returns every fault of these arguments of `attend`; no number in a tensor is read."""
    parts = {"query": query, "key": key, "value": value}
    flat = [
        f"{name} is {_found(part)}; it must be (batch, rows, heads, size) of a floating-point dtype"
        for name, part in parts.items()
        if not isinstance(part, Tensor) or part.dim() != 4 or not part.is_floating_point()
    ]
    options = [*_window_misfits(window, causal), *_number_misfits(soft_cap=soft_cap, scale=scale)]
    if flat:  # the rest is about their shapes
        return flat + options
    num_examples, num_queries, heads, _ = query.shape
    num_keys = key.shape[1]
    queries, keys = (num_examples, num_queries), (num_examples, num_keys)
    return [
        *_shape_misfits(query, key, value),
        *(
            [f"{num_queries} queries cannot be the last rows of {num_keys} keys"]
            if causal and num_queries > num_keys
            else []
        ),
        *options,
        *_pair_misfits(query_segments, key_segments),
        *_leaf_misfits("query_segments", query_segments, queries, "batch, queries", "an integer"),
        *_leaf_misfits("key_segments", key_segments, keys, "batch, keys", "an integer"),
        *_leaf_misfits("visible", visible, keys, "batch, keys", "a boolean"),
        *_leaf_misfits("sinks", sinks, (heads,), "query heads", "a floating-point"),
        *_device_misfits(
            parts | {"query_segments": query_segments, "key_segments": key_segments, "visible": visible, "sinks": sinks}
        ),
    ]


def _shape_misfits(query: Tensor, key: Tensor, value: Tensor) -> Iterator[str]:
    heads, kv_heads = query.shape[2], key.shape[2]
    if not heads or not kv_heads:
        yield f"{heads} query heads and {kv_heads} key heads; both must be at least 1"
    elif heads % kv_heads:
        yield f"{heads} query heads are no multiple of {kv_heads} key heads"
    if key.shape[:3] != value.shape[:3]:
        yield f"keys {tuple(key.shape)} and values {tuple(value.shape)} differ before the last dimension"
    if query.shape[0] != key.shape[0]:
        yield f"queries of {query.shape[0]} examples and keys of {key.shape[0]}; both must be of the same"
    if query.shape[-1] != key.shape[-1] or not query.shape[-1]:
        yield f"queries of size {query.shape[-1]} and keys of size {key.shape[-1]}; sizes must be equal and at least 1"
    dtypes = [str(part.dtype).removeprefix("torch.") for part in (query, key, value)]
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(query.device.type):
        yield f"queries, keys and values are {', '.join(dtypes)}; they must be of one dtype"


def _window_misfits(window: Any, causal: bool) -> Iterator[str]:
    if window is not None and (not is_count(window) or window < 1 or not causal):
        yield (
            f"window is {shown(window)} with causal={causal}; a window is a whole number from 1 and needs causal=True"
        )


def _number_misfits(**numbers: Any) -> Iterator[str]:
    for name, number in numbers.items():
        if number is not None and not (is_real(number) and number is not True and 0 < float(number) < inf):
            yield f"{name} is {shown(number)}; it must be a number above 0, and finite (None: the default)"


def _pair_misfits(query_segments: Tensor | None, key_segments: Tensor | None) -> Iterator[str]:
    if (query_segments is None) != (key_segments is None):
        yield "query_segments and key_segments must be given together"


def _leaf_misfits(name: str, leaf: Any, shape: tuple[int, ...], words: str, kind: str) -> Iterator[str]:
    if leaf is None:
        return
    if not isinstance(leaf, Tensor) or tuple(leaf.shape) != shape or _kind(leaf.dtype) != kind:
        yield f"{name} is {_found(leaf)}; it must be ({words}), here {shape}, of {kind} dtype"


def _device_misfits(tensors: dict[str, Any]) -> Iterator[str]:
    devices = {name: leaf.device for name, leaf in tensors.items() if isinstance(leaf, Tensor)}
    if len(set(devices.values())) > 1:
        yield f"tensors are on several devices: {', '.join(f'{name} on {device}' for name, device in devices.items())}"


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "a boolean"
    if dtype.is_complex:
        return "a complex"
    return "a floating-point" if dtype.is_floating_point else "an integer"


def _found(leaf: Any) -> str:
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
