"""Schedules: pure functions from the number of steps taken so far to a number, such as a learning rate.

The first step reads count 0. Names and meanings are those of optax's schedules; cosine decay is from
Loshchilov & Hutter, 'SGDR', 2017, equation 5.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import cos, pi

from rpfunc.errors import OptimizerError
from rpfunc.optim.checks import check_number

Schedule = Callable[[int], float]
"""From a count of steps, 0 at the first, to a number."""


def constant(value: float) -> Schedule:
    """Returns the schedule that is always `value`."""
    return lambda count: value


def linear(init_value: float, end_value: float, transition_steps: int) -> Schedule:
    """Returns a straight line from `init_value` at count 0 to `end_value` at `transition_steps` and after.

    Raises OptimizerError if `transition_steps` is negative.

    >>> [linear(0.0, 1.0, 4)(count) for count in range(6)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    _check_steps("transition_steps", transition_steps, 0)

    def schedule(count: int) -> float:
        if count >= transition_steps:
            return end_value
        return init_value + (end_value - init_value) * count / transition_steps

    return schedule


def cosine_decay(init_value: float, decay_steps: int, alpha: float = 0.0) -> Schedule:
    """Returns half a cosine from `init_value` at count 0 down to `alpha * init_value` at `decay_steps` and after.

    Raises OptimizerError if `decay_steps` is less than 1.

    >>> [cosine_decay(2.0, 2)(count) for count in range(4)]
    [2.0, 1.0, 0.0, 0.0]
    """
    _check_steps("decay_steps", decay_steps, 1)

    def schedule(count: int) -> float:
        fall = (1 + cos(pi * min(count, decay_steps) / decay_steps)) / 2
        return init_value * ((1 - alpha) * fall + alpha)

    return schedule


def warmup_cosine(
    init_value: float, peak_value: float, warmup_steps: int, decay_steps: int, end_value: float = 0.0
) -> Schedule:
    """Returns a line from `init_value` up to `peak_value`, then half a cosine down to `end_value`.

    warmup_steps: count at the peak. decay_steps: count at the end, so the warm-up is part of it.
    Raises OptimizerError if `decay_steps` is not beyond `warmup_steps`.

    >>> [warmup_cosine(0.0, 1.0, 2, 4)(count) for count in range(6)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    _check_steps("warmup_steps", warmup_steps, 0)
    _check_steps("decay_steps", decay_steps, warmup_steps + 1)
    # The cosine runs from 1 to 0 so that no peak is divided by: it may be zero.
    fall = cosine_decay(1.0, decay_steps - warmup_steps)
    decay: Schedule = lambda count: end_value + (peak_value - end_value) * fall(count)  # noqa: E731
    return join([linear(init_value, peak_value, warmup_steps), decay], [warmup_steps])


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Returns schedules one after the other, each counting from its own 0 where the one before it ends.

    boundaries: the count at which each schedule but the first begins, in ascending order.
    Raises OptimizerError unless there is one boundary less than schedules, and they ascend from 0.

    >>> rate = join([linear(0.0, 1.0, 2), linear(1.0, 0.0, 2)], [2])
    >>> [rate(count) for count in range(5)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if len(boundaries) != len(schedules) - 1:
        raise OptimizerError(
            f"join was given {len(schedules)} schedules and {len(boundaries)} boundaries; "
            f"needed is one boundary less than schedules, and at least one schedule"
        )
    if list(boundaries) != sorted(boundaries) or any(boundary < 0 for boundary in boundaries):
        raise OptimizerError(f"boundaries are {list(boundaries)}; they must ascend from 0, for example [100, 200]")
    schedules, starts = tuple(schedules), (0, *boundaries)

    def schedule(count: int) -> float:
        index = bisect_right(starts, count, lo=1) - 1
        return schedules[index](count - starts[index])

    return schedule


def _check_steps(name: str, steps: int, least: int) -> None:
    check_number(name, steps, f"at least {least}", lambda found: found >= least, max(least, 100))
