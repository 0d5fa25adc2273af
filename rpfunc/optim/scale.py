"""Updates multiplied by a number: fixed, scheduled, or minus the learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rpfunc.optim.base import Transformation, from_leafwise
from rpfunc.optim.checks import check_not_negative, check_number
from rpfunc.optim.leafwise import Leafwise
from rpfunc.optim.schedules import Schedule


def identity() -> Transformation:
    """Returns the transformation that changes nothing."""
    return from_leafwise(Leafwise(leaf=lambda path, update, state, param, coefficients: (update, state)))


def scale(step_size: float) -> Transformation:
    """Returns the transformation u -> step_size u.

    Raises OptimizerError if `step_size` is not finite.
    """
    check_number("step_size", step_size, "finite", lambda value: True, 1.0)
    return from_leafwise(Leafwise(leaf=lambda path, update, state, param, coefficients: (update * step_size, state)))


def scale_by_schedule(schedule: Schedule) -> Transformation:
    """Returns the transformation u -> schedule(count) u, with count = 0 at the first step.

    The shared state is the count, 0-d int64.
    """

    def init_shared() -> Tensor:
        return torch.zeros((), dtype=torch.int64)

    def scalars(count: Tensor, total: float | None) -> tuple[float, Tensor]:
        return schedule(int(count)), count + 1

    def leaf(path: str, update: Tensor, state: Any, param: Tensor, step_size: float) -> tuple[Tensor, Any]:
        return update * step_size, state

    return from_leafwise(Leafwise(leaf=leaf, init_shared=init_shared, scalars=scalars))


def scale_by_learning_rate(learning_rate: float | Schedule) -> Transformation:
    """Returns the transformation u -> -learning_rate u: the descent step, last in a chain.

    Raises OptimizerError if the rate is negative or not finite; for a schedule, at the step that reads it.
    """
    if not callable(learning_rate):
        check_not_negative("learning_rate", learning_rate, 1e-3)
        return scale(-learning_rate)

    def negated(count: int) -> float:
        rate = learning_rate(count)
        check_not_negative(f"learning_rate at count {count}", rate, 1e-3)
        return -rate

    return scale_by_schedule(negated)
