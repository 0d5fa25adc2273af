"""The global norm of a tree, and clipping by it.

Source: Pascanu et al., 'On the difficulty of training recurrent neural networks', 2013, algorithm 1.
"""

from __future__ import annotations

from math import hypot, inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.optim.base import Transformation, from_leafwise
from rpfunc.optim.checks import check_not_negative
from rpfunc.optim.leafwise import exact_sum, from_linear
from rpfunc.optim.linear import Linear
from rpfunc.optim.rows import Row, blocks, contiguous, working_dtype
from rpfunc.tree import Tree

RUN_NUMEL = 1024
"""Elements whose squares are summed in float32, if that is their dtype: too few to lose more than its last digit."""

SMALLEST = 1e-12
"""Least norm of a block beside which elements do not count whose squares vanish in float32."""


def global_norm(updates: Tree) -> float:
    """Returns the Euclidean norm of all leaves together, accumulated in float64; 0.0 for an empty tree.

    Runs of 1,024 elements are summed in float32, if that is their dtype. The number of threads changes no bit.
    It is infinite or NaN if an element is; and, for float64 leaves only, infinite beyond about 1e154.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    5.0
    """
    return sqrt(exact_sum(squared_norms(updates)))


def squared_norms(updates: Tree) -> list[float]:
    """Returns the square of each leaf's norm: what `global_norm` adds up, for any part of a tree."""
    rows = (contiguous(Row("", leaf, (), leaf)) for leaf in tree.leaves(updates))
    return [exact_sum(_squared_norm(block.update) for block in blocks(row)) for row in rows]


def clip_by_global_norm(max_norm: float) -> Transformation:
    """Returns the transformation that scales updates down to a global norm of `max_norm` if theirs is greater.

    Otherwise their values are exactly unchanged. That includes a norm that is infinite or NaN, since no factor
    would help: finite elements stay what they were, and the caller, who sees the same from `global_norm`, is to
    skip the step. Raises OptimizerError if `max_norm` is negative or not finite.
    """
    check_not_negative("max_norm", max_norm, 1.0)

    def reduce(path: str, update: Tensor, state: Any, shared: Any) -> float:
        return _squared_norm(update)

    def scalars(shared: Any, total: float | None) -> tuple[float, Any]:
        norm = sqrt(total or 0.0)
        return (max_norm / norm if isfinite(norm) and norm > max_norm else 1.0), shared

    return from_leafwise(from_linear(lambda state, factor: Linear(factor), reduce=reduce, scalars=scalars))


def _squared_norm(update: Tensor) -> float:
    flat = update.detach().to(working_dtype(update)).reshape(-1)
    norm = _norm(flat)
    if flat.numel() and not SMALLEST < norm < inf:
        # Squares of float32 vanish below 1e-23 and overflow from 2e19 on.
        largest = float(torch.linalg.vector_norm(flat, inf))
        norm = largest * _norm(flat / largest) if 0 < largest < inf else largest
    return norm * norm


def _norm(flat: Tensor) -> float:
    whole = flat.numel() // RUN_NUMEL * RUN_NUMEL
    rest = _float64_norm(flat[whole:]) if whole < flat.numel() else 0.0
    if not whole:
        return rest
    # torch gives a row to one thread, and the rows to all: fast, and the same bits for any number of threads.
    return hypot(_float64_norm(torch.linalg.vector_norm(flat[:whole].view(-1, RUN_NUMEL), dim=1)), rest)


def _float64_norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values.double()))
