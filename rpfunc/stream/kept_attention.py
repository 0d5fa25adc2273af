"""Attention's results, kept from a layer's forward pass until its rows are recomputed.

A streamed layer is computed twice, and most of the second time may go into attention, whose cost grows with the rows
before it. Its results are small beside what it took to find them: the output and one log-sum-exp for each query and
head. Source: own; FlashAttention (arXiv 2205.14135, section 3.1) keeps the same two for its own backward pass.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from rpfunc.stream.split_attention import attention_with_sums, known_attention, split_attention
from rpfunc.stream.transforms import running_transforms


class KeptAttention:
    """What the attention of chunks gave, those in the last `share` of the rows, by a chunk's first row.

    `recomputing` hands a chunk's results out once.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._results: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def computing(self, start: int, num_rows: int) -> AbstractContextManager[Any]:
        """Returns a context in which `split_attention` notes its results as those of the chunk at row `start`."""
        if start < (1.0 - self._share) * num_rows:
            return nullcontext()
        return _Computing(self._results.setdefault(start, []))

    def recomputing(self, start: int) -> TorchFunctionMode:
        """Returns a context in which `split_attention` takes that chunk's results, in the order of its calls."""
        return _Recomputing(self._results.pop(start, []))


class _Computing(TorchFunctionMode):
    def __init__(self, results: list[tuple[Tensor, Tensor]]) -> None:
        self._results = results
        self._transforms = running_transforms()  # inside further ones, a result is not to be kept

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not split_attention or running_transforms() != self._transforms:
            return function(*args, **(kwargs or {}))
        result = attention_with_sums(*args)
        self._results.append(result)
        return result[0]


class _Recomputing(TorchFunctionMode):
    def __init__(self, results: list[tuple[Tensor, Tensor]]) -> None:
        self._results = results
        self._transforms = (*running_transforms(), "Grad")  # the vjp of the recomputed chunk

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is split_attention and self._results and running_transforms() == self._transforms:
            return known_attention(self._results.pop(0), *args)
        return function(*args, **(kwargs or {}))
