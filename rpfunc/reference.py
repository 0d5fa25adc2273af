"""The yardstick: the gradient as one plain `torch.func.vjp` of the composed model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.model import Model, Params
from rpfunc.objectives.checked import checked
from rpfunc.objectives.objective import Objective


def value_and_grad(model: Model, objective: Objective) -> Callable[[Params, Batch], tuple[Tensor, dict[str, Any]]]:
    """Returns fn(params, batch) -> (loss (), gradients like params): no cuts, no stages, no workers, no streaming.

    Everything rpfunc does faster or in less memory is compared with this. Holds every residual of the model at once.
    """
    objective = checked(objective)

    def function(params: Params, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        model.check(params)
        prepared = objective.prepare(batch)
        total = objective.total(prepared)
        if objective.statistic is not None:
            with torch.no_grad():
                sums = objective.score(model(params, prepared), prepared).double().sum(dim=1)
                constant = {**prepared.constant, "statistic": objective.statistic(sums, prepared)}
            prepared = replace(prepared, constant=constant)
        leaves, structure = tree.flatten(dict(params))

        def loss(*leaves: Tensor) -> Tensor:
            scores = objective.score(model(tree.unflatten(structure, leaves), prepared), prepared)
            return objective.loss(scores.double().sum(dim=1), prepared, total)

        result: Any = torch.func.vjp(loss, *leaves)
        value, pull = result
        return value, tree.unflatten(structure, pull(torch.ones_like(value)))

    return function
