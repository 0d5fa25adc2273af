"""Which tensors a donated step may overwrite.

Source: own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import OptimizerError
from rpfunc.tree import Tree


def check_donatable(updates: Tree, state: Any, params: Tree) -> None:
    """Raises OptimizerError that lists every leaf whose storage must not, or cannot, be overwritten.

    Refused among params and state: an expanded tensor (one place, several elements); a module's parameter; memory
    that torch does not own, such as a mapped file or a NumPy array; two tensors in the same memory, or one in that
    of an update. Interleaved views, such as columns of a matrix, count as apart unless they begin together.
    """
    written = _named("params", params) + _named("state", state)
    read = _named("updates", updates)
    problems = [problem for name, leaf in written for problem in _faults(name, leaf)]
    problems += [
        f"{name} is a {type(leaf).__name__}; a tensor is needed" for name, leaf in read if not _is_tensor(leaf)
    ]
    if not problems:
        problems = _overlaps(
            [_span(*each, written=True) for each in written] + [_span(*each, written=False) for each in read]
        )
    if problems:
        raise OptimizerError.listing("cannot be donated", problems)


class _Span(NamedTuple):
    start: int  # address of the first byte
    end: int  # address after the last byte
    name: str
    contiguous: bool
    written: bool


def _named(name: str, values: Tree) -> list[tuple[str, Any]]:
    return list(zip(tree.paths({name: values}), tree.leaves(values), strict=True))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _faults(name: str, leaf: Any) -> list[str]:
    if not isinstance(leaf, Tensor):
        return [f"{name} is a {type(leaf).__name__}; a tensor is needed"]
    if isinstance(leaf, torch.nn.Parameter):
        return [f"{name} is a module's parameter; give a detached clone"]
    if any(stride == 0 and size > 1 for size, stride in zip(leaf.shape, leaf.stride(), strict=True)):
        return [f"{name} is expanded, one place for several elements; give a clone with its own"]
    # A storage that torch allocated can be resized; one that wraps a mapped file or foreign memory cannot.
    if leaf.numel() and leaf.device.type == "cpu" and not leaf.untyped_storage().resizable():
        return [f"{name} lies in memory that torch does not own, such as a mapped file; give a clone"]
    return []


def _span(name: str, tensor: Tensor, *, written: bool) -> _Span:
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = (steps + 1) * tensor.element_size() if tensor.numel() else 0
    return _Span(tensor.data_ptr(), tensor.data_ptr() + length, name, tensor.is_contiguous(), written)


def _overlaps(spans: list[_Span]) -> list[str]:
    problems = []
    last = _Span(-1, -1, "", True, False)
    for span in sorted(spans):
        met = span.start < min(last.end, span.end) and (span.written or last.written)
        if met and (span.start == last.start or (span.contiguous and last.contiguous)):
            problems.append(f"{last.name} and {span.name} share memory; give one of them a clone")
        last = max(last, span, key=lambda each: each.end)
    return problems
