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
    made in inference mode, outside of it; one that is mapped from a file (where the system can tell: on Linux); two in
    the same memory, or one in that of an update. Interleaved views, such as columns of a matrix, count as apart
    unless they begin together.
    """
    written, read = {"params": params, "state": state}, {"updates": updates}
    leaves, num_written = tree.leaves((written, read)), len(tree.leaves(written))
    faults = [(index, fault) for index, fault in enumerate(map(_fault, leaves[:num_written])) if fault]
    overlaps = [] if faults else _overlaps(leaves, num_written)
    if faults or overlaps:
        names = tree.paths(written) + tree.paths(read)  # which take longer than all that was done
        problems = [f"{names[index]} {fault}" for index, fault in faults]
        problems += [f"{names[a]} and {names[b]} share memory; give one of them a clone" for a, b in overlaps]
        raise OptimizerError.listing("cannot be donated", problems)


class _Span(NamedTuple):
    start: int  # address of the first byte
    end: int  # address after the last byte
    place: int
    contiguous: bool
    written: bool


def _fault(leaf: Any) -> str | None:
    if not isinstance(leaf, Tensor):
        return f"is a {type(leaf).__name__}; a tensor is needed"
    if isinstance(leaf, torch.nn.Parameter):
        return "is a module's parameter; give a detached clone"
    if leaf.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference mode; give a clone that was not"
    if any(stride == 0 and size > 1 for size, stride in zip(leaf.shape, leaf.stride(), strict=True)):
        return "is expanded, one place for several elements; give a clone with its own"
    file = _mapped_file(leaf)
    return f"is mapped from {file}; give a clone" if file else None


def _mapped_file(tensor: Tensor) -> str | None:
    # torch does not say what a storage maps. One that it allocated can be resized, and so maps nothing; but one that
    # cannot may also just have been looked at through NumPy, so the system is asked.
    if tensor.untyped_storage().resizable() or not tensor.numel() or tensor.device.type != "cpu":
        return None
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text().splitlines():
        span, _, _, _, _, *file = line.split(maxsplit=5)  # 7f00-7f10 rw-p 00000000 08:01 1234 /path
        start, end = (int(address, 16) for address in span.split("-"))
        if start <= tensor.data_ptr() < end and file and file[0].startswith("/"):
            shared = file[0].startswith(("/dev/shm/", "/memfd:"))  # memory shared by processes, in spite of its name
            return None if shared else file[0]
    return None


def _span(index: int, tensor: Tensor, written: bool) -> _Span:
    start, contiguous, numel = tensor.data_ptr(), tensor.is_contiguous(), tensor.numel()
    if numel and not contiguous:
        numel = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _Span(start, start + numel * tensor.element_size(), index, contiguous, written)


def _overlaps(leaves: list[Any], num_written: int) -> list[tuple[int, int]]:
    """Returns pairs of leaves in the same memory; the first `num_written` are written, the others read."""
    spans = [_span(index, leaf, index < num_written) for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    pairs: dict[tuple[int, int], None] = {}
    # of each kind the one before that reaches furthest: a wide one with gaps, or one that is only read, hides none
    furthest: dict[tuple[bool, bool], _Span] = {}
    for span in sorted(spans):
        for last in furthest.values():
            met = span.start < min(last.end, span.end) and (span.written or last.written)
            if met and (span.start == last.start or (span.contiguous and last.contiguous)):
                pairs[last.place, span.place] = None
        kind = span.contiguous, span.written
        if kind not in furthest or span.end > furthest[kind].end:
            furthest[kind] = span
    return list(pairs)
