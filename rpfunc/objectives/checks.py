"""Refusals of option values that cannot work: what was found, what is needed, a value that would work."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

from rpfunc.checks import is_real, shown
from rpfunc.errors import OptionsError


def check_options(objective: str, problems: Iterable[str | None]) -> None:
    """Raises OptionsError listing all problems that are not None.

    >>> check_options("dpo", [at_least("beta", 0.1, 0.0, 0.1), between("label_smoothing", 0.7, 0.0, 0.5, 0.1)])
    Traceback (most recent call last):
    rpfunc.errors.OptionsError: dpo: label_smoothing is 0.7; it must be in [0, 0.5), for example 0.1
    """
    found = [problem for problem in problems if problem is not None]
    if found:
        raise OptionsError.listing(objective, found)


def above(name: str, value: Any, low: float, example: float) -> str | None:
    """Returns what is wrong unless `value` is finite and above `low`."""
    return _unless(_is_finite(value) and value > low, name, value, f"finite and above {low:g}", example)


def at_least(name: str, value: Any, low: float, example: float) -> str | None:
    """Returns what is wrong unless `value` is finite and at least `low`."""
    return _unless(_is_finite(value) and value >= low, name, value, f"finite and at least {low:g}", example)


def between(name: str, value: Any, low: float, high: float, example: float) -> str | None:
    """Returns what is wrong unless low <= value < high."""
    return _unless(_is_finite(value) and low <= value < high, name, value, f"in [{low:g}, {high:g})", example)


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> str | None:
    """Returns what is wrong unless `value` is one of `choices`."""
    return _unless(value in choices, name, value, f"one of {', '.join(map(repr, choices))}", repr(choices[0]))


def logits_problems(temperature: Any, soft_cap: Any) -> list[str | None]:
    """Returns what is wrong with the two options about logits that every objective has."""
    return [
        above("temperature", temperature, 0.0, 1.0),
        None
        if soft_cap is None
        else _unless(_is_finite(soft_cap) and soft_cap > 0, "soft_cap", soft_cap, "finite and above 0", "None"),
    ]


def _is_finite(value: Any) -> bool:
    return is_real(value) and not isinstance(value, bool) and isfinite(value)


def _unless(holds: bool, name: str, value: object, needed: str, example: object) -> str | None:
    return None if holds else f"{name} is {shown(value)}; it must be {needed}, for example {example}"
