"""An objective whose functions are looked after: what they return is what the rest of rpfunc builds on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.checks import is_real
from rpfunc.errors import ModelError
from rpfunc.objectives.objective import Objective


def checked(objective: Objective) -> Objective:
    """Returns the objective, of which a function that returns something else than `Objective` asks for raises
    ModelError naming it. Cost: some µs a call.
    """

    def prepare(batch: Batch) -> Batch:
        prepared = objective.prepare(batch)
        if not isinstance(prepared, Batch):
            raise _wrong(objective, "prepare", prepared, "the batch, with leaves added")
        if prepared.num_examples != batch.num_examples:
            found = f"a Batch of {prepared.num_examples} examples"
            raise _wrong(objective, "prepare", found, f"the batch's own {batch.num_examples}")
        return prepared

    def total(batch: Batch) -> Tensor:
        found: Any = objective.total(batch)
        if is_real(found) and not isinstance(found, bool):
            return torch.tensor(float(found), dtype=torch.float64)
        if not isinstance(found, Tensor) or found.dim() or found.dtype == torch.bool or found.is_complex():
            raise _wrong(objective, "total", found, "one number, a tensor ()")
        return found.double()

    def score(output: Any, batch: Batch) -> Tensor:
        found: Any = objective.score(output, batch)
        examples = batch.num_examples
        if not isinstance(found, Tensor) or found.dim() < 2 or len(found) != examples:
            raise _wrong(
                objective, "score", found, f"a number for each row, ({examples}, rows) or ({examples}, rows, K)"
            )
        if not found.is_floating_point():
            real = " (a loss is real: output.real, for example)" if found.is_complex() else ""
            raise _wrong(objective, "score", found, f"floating-point numbers, which have a gradient{real}")
        return found

    def loss(sums: Tensor, batch: Batch, total: Tensor) -> Tensor:
        found: Any = objective.loss(sums, batch, total)
        if not isinstance(found, Tensor) or found.dim() or not found.is_floating_point():
            raise _wrong(objective, "loss", found, "one number, a tensor () made of the sums, as sums.sum() / total is")
        return found

    def statistic(sums: Tensor, batch: Batch) -> Tensor:
        assert objective.statistic is not None
        found: Any = objective.statistic(sums, batch)
        if not isinstance(found, Tensor):
            raise _wrong(objective, "statistic", found, "a tensor")
        return found

    return replace(
        objective,
        prepare=prepare,
        total=total,
        score=score,
        loss=loss,
        statistic=None if objective.statistic is None else statistic,
    )


def _wrong(objective: Objective, function: str, found: Any, needed: str) -> ModelError:
    if isinstance(found, Tensor):
        found = f"{found.dtype} {tuple(found.shape)}"
    elif not isinstance(found, str):
        found = f"a {type(found).__name__}"
    return ModelError(f"objective {objective.name!r}: its `{function}` returned {found}; it must return {needed}")
