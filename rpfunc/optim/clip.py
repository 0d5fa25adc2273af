"""The global norm of a tree, and clipping by it.

Source: Pascanu et al., 'On the difficulty of training recurrent neural networks', 2013, algorithm 1.
"""

from __future__ import annotations

from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.optim.base import Transformation, from_leafwise
from rpfunc.optim.checks import check_not_negative
from rpfunc.optim.leafwise import Leafwise, exact_sum
from rpfunc.optim.rows import Row, blocks
from rpfunc.tree import Tree


def global_norm(updates: Tree) -> float:
    """Returns the Euclidean norm of all leaves together, accumulated in float64; 0.0 for an empty tree.

    It is infinite or NaN if an element is; and, for float64 leaves only, infinite beyond about 1e154.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    5.0
    """
    rows = [Row("", leaf, (), leaf) for leaf in tree.leaves(updates)]
    return sqrt(exact_sum(exact_sum(_squared_norm(block.update) for block in blocks(row)) for row in rows))


def clip_by_global_norm(max_norm: float) -> Transformation:
    """Returns the transformation that scales updates down to a global norm of `max_norm` if theirs is greater.

    Otherwise their values are exactly unchanged. That includes a norm that is infinite or NaN, since no factor
    would help: finite elements stay what they were, and the caller, who sees the same from `global_norm`, is to
    skip the step. Raises OptimizerError if `max_norm` is negative or not finite.
    """
    check_not_negative("max_norm", max_norm, 1.0)

    def reduce(path: str, update: Tensor, state: Any, shared: Any) -> float:
        return _squared_norm(update)

    def scalars(shared: Any, total: float | None) -> tuple[float | None, Any]:
        norm = sqrt(total or 0.0)
        return (max_norm / norm if isfinite(norm) and norm > max_norm else None), shared

    def leaf(path: str, update: Tensor, state: Any, param: Tensor, factor: float | None) -> tuple[Tensor, Any]:
        return (update if factor is None else update * factor), state

    return from_leafwise(Leafwise(leaf=leaf, reduce=reduce, scalars=scalars))


def _squared_norm(update: Tensor) -> float:
    # Squares of float32 overflow it from 2e19 on; torch converts element by element, without a float64 copy.
    norm = float(torch.linalg.vector_norm(update.detach(), dtype=torch.float64))
    return norm * norm
