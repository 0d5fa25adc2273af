"""Which tensors a donated step may overwrite.

Source: own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import OptimizerError
from rpfunc.tree import Tree


def check_donatable(updates: Tree, state: Any, params: Tree) -> None:
    """Raises OptimizerError that lists every leaf whose storage must not, or cannot, be overwritten.

    Refused among params and state: an expanded tensor (one place, several elements); a module's parameter; a tensor
    mapped from a file (where the system can tell: on Linux); two tensors in the same memory, or one in that of an
    update. Interleaved views, such as columns of a matrix, count as apart unless they begin together.
    """
    written = _named("params", params) + _named("state", state)
    read = [(name, leaf) for name, leaf in _named("updates", updates) if isinstance(leaf, Tensor)]
    problems = [problem for name, leaf in written for problem in _faults(name, leaf)]
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


def _faults(name: str, leaf: Any) -> list[str]:
    if not isinstance(leaf, Tensor):
        return [f"{name} is a {type(leaf).__name__}; a tensor is needed"]
    if isinstance(leaf, torch.nn.Parameter):
        return [f"{name} is a module's parameter; give a detached clone"]
    if any(stride == 0 and size > 1 for size, stride in zip(leaf.shape, leaf.stride(), strict=True)):
        return [f"{name} is expanded, one place for several elements; give a clone with its own"]
    file = _mapped_file(leaf)
    return [f"{name} is mapped from {file}; give a clone"] if file else []


def _mapped_file(tensor: Tensor) -> str | None:
    # torch does not say what a storage maps. One that it allocated can be resized, and so maps nothing; but one that
    # cannot may also just have been looked at through NumPy, so the system is asked.
    maps = Path("/proc/self/maps")
    if not tensor.numel() or tensor.device.type != "cpu" or tensor.untyped_storage().resizable() or not maps.exists():
        return None
    for line in maps.read_text().splitlines():
        span, _, _, _, _, *file = line.split(maxsplit=5)  # 7f00-7f10 rw-p 00000000 08:01 1234 /path
        start, end = (int(address, 16) for address in span.split("-"))
        if start <= tensor.data_ptr() < end and file and file[0].startswith("/"):
            shared = file[0].startswith(("/dev/shm/", "/memfd:"))  # memory shared by processes, in spite of its name
            return None if shared else file[0]
    return None


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
