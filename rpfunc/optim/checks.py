"""Refusals of numbers that cannot work, all in one sentence: what was found, what is needed, what would work."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from rpfunc.errors import OptimizerError


def check_number(name: str, value: float, needed: str, holds: Callable[[float], bool], example: float) -> None:
    """Raises OptimizerError unless `value` is a finite number for which `holds`.

    >>> check_number("b1", 1.5, "in [0, 1)", lambda b1: 0 <= b1 < 1, 0.9)
    Traceback (most recent call last):
    rpfunc.errors.OptimizerError: b1 is 1.5; it must be in [0, 1), for example 0.9
    """
    if not (isfinite(value) and holds(value)):
        raise OptimizerError(f"{name} is {value}; it must be {needed}, for example {example}")


def check_not_negative(name: str, value: float, example: float) -> None:
    """Raises OptimizerError unless `value` is finite and at least 0."""
    check_number(name, value, "finite and at least 0", lambda found: found >= 0, example)


def check_decay(name: str, value: float, example: float) -> None:
    """Raises OptimizerError unless `value`, the share of a running average that a step keeps, is in [0, 1)."""
    check_number(name, value, "in [0, 1)", lambda found: 0 <= found < 1, example)
