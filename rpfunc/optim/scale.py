"""Updates multiplied by a number: fixed, scheduled, or minus the learning rate."""

from __future__ import annotations

import torch
from torch import Tensor

from rpfunc.optim.base import Transformation, from_leafwise
from rpfunc.optim.checks import check_not_negative, check_number
from rpfunc.optim.leafwise import from_linear
from rpfunc.optim.linear import Linear
from rpfunc.optim.schedules import Schedule


def identity() -> Transformation:
    """Returns the transformation that changes nothing."""
    return from_leafwise(from_linear(lambda state, coefficients: Linear()))


def scale(step_size: float) -> Transformation:
    """Returns the transformation u -> step_size u.

    Raises OptimizerError if `step_size` is not finite.
    """
    check_number("step_size", step_size, "finite", lambda value: True, 1.0)
    return from_leafwise(from_linear(lambda state, coefficients: Linear(step_size)))


def scale_by_schedule(schedule: Schedule) -> Transformation:
    """Returns the transformation u -> schedule(count) u, with count = 0 at the first step.

    The shared state is the count, 0-d int64.
    """

    def init_shared() -> Tensor:
        return torch.zeros((), dtype=torch.int64)

    def scalars(count: Tensor, total: float | None) -> tuple[float, Tensor]:
        return schedule(int(count)), count + 1

    return from_leafwise(
        from_linear(lambda state, step_size: Linear(step_size), init_shared=init_shared, scalars=scalars)
    )


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
