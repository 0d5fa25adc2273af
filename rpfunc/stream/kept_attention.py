"""Attention's results, kept from a layer's forward pass until its rows are recomputed.

A streamed layer is computed twice, and most of the second time may go into attention, whose cost grows with the rows
before it. Its results are small beside what it took to find them: the output and one log-sum-exp for each query and
head. Source: own; FlashAttention (arXiv 2205.14135, section 3.1) keeps the same two for its own backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from rpfunc.stream.split_attention import attention_with_sums, known_attention, split_attention


class KeptAttention:
    """What chunks' attention gave, by the last row that a chunk sees; `recomputing` hands each result out once."""

    def __init__(self) -> None:
        self._results: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def computing(self) -> TorchFunctionMode:
        """Returns a context in which `split_attention` notes its results."""
        return _Computing(self._results)

    def recomputing(self) -> TorchFunctionMode:
        """Returns a context in which `split_attention` takes the noted results, in the order of each chunk's calls."""
        return _Recomputing(self._results)


class _Computing(TorchFunctionMode):
    def __init__(self, results: defaultdict[int, list[tuple[Tensor, Tensor]]]) -> None:
        self._results = results

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not split_attention:
            return function(*args, **(kwargs or {}))
        result = attention_with_sums(*args)
        self._results[args[1].shape[1]].append(result)
        return result[0]


class _Recomputing(TorchFunctionMode):
    def __init__(self, results: defaultdict[int, list[tuple[Tensor, Tensor]]]) -> None:
        self._results = results

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = self._results[args[1].shape[1]] if function is split_attention else []
        return known_attention(*args, results.pop(0)) if results else function(*args, **(kwargs or {}))
