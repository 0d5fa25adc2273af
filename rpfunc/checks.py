"""What numbers may be: one place for all that comes in by hand, by file or by option."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

LEAST, MOST = 1e-100, 1e100
"""Between these, no sum, product or quotient of the numbers that rpfunc works with passes what a float can hold."""

MOST_COUNT = 10**18
"""The largest whole number; as many digits as a task's may have."""


def is_size(value: Any) -> bool:
    """Returns whether a value is a time or a number of bytes: 0, or from LEAST to MOST.

    >>> [is_size(value) for value in (0, 2.5, -1, float("nan"), 1e-300, "2")]
    [True, True, False, False, False, False]
    """
    number = plain_number(value)  # a float of 32 bits knows no such bounds
    return is_real(number) and bool(number == 0 or LEAST <= number <= MOST)


def plain_number(value: Any) -> Any:
    """Returns Python's own number for one of numpy's, whose sums can be too large for their bits; others as they are.

    >>> plain_number(np.int32(2)) + 2**31
    2147483650
    """
    return value.item() if isinstance(value, np.generic) else value


def size_problems(sizes: Mapping[str, object]) -> list[str]:
    """Returns, in words, each of the named values that is no size."""
    return [f"{name} is {shown(value)}, {size_needed(value)}" for name, value in sizes.items() if not is_size(value)]


def size_needed(value: Any) -> str:
    """Returns what a value that is no size must be."""
    within = is_real(value) and 0 <= value < math.inf
    return f"it must be 0 or from {LEAST:g} to {MOST:g}" if within else "it must be at least 0 and finite"


def rate_problems(rates: Mapping[str, Any]) -> list[str]:
    """Returns, in words, each of the named values that is no rate: above 0, at most MOST unless infinite."""
    problems = []
    for name, value in rates.items():
        if not (is_real(value) and value > 0):
            problems.append(f"{name} is {shown(value)}, it must be above 0")
        elif not (LEAST <= value <= MOST or value == math.inf):
            problems.append(f"{name} is {shown(value)}, it must be from {LEAST:g} to {MOST:g}, or infinite")
    return problems


def count_problems(counts: Mapping[str, Any], least: int = 1, most: int = MOST_COUNT) -> list[str]:
    """Returns, in words, each of the named values that is no whole number from `least` to `most`, True and False too.

    >>> count_problems({"workers": 0, "microbatches": 2.5})
    ['workers is 0, it must be at least 1', 'microbatches is 2.5, it must be a whole number']
    """
    problems = []
    for name, value in counts.items():
        if not is_count(value):
            problems.append(f"{name} is {shown(value)}, it must be a whole number")
        elif value < least:
            problems.append(f"{name} is {shown(value)}, it must be at least {least}")
        elif value > most:
            problems.append(f"{name} is {shown(value)}, it must be at most {most}")
    return problems


def flag_problems(flags: Mapping[str, Any]) -> list[str]:
    """Returns, in words, each of the named values that is neither True nor False.

    >>> flag_problems({"donate": "no", "bound": False})
    ["donate is 'no', it must be True or False"]
    """
    return [
        f"{name} is {shown(value)}, it must be True or False"
        for name, value in flags.items()
        if not isinstance(value, bool)
    ]


def call_problems(name: str, function: Callable[..., Any], parameters: Sequence[str]) -> list[str]:
    """Returns, in words, why a function cannot be called with those parameters by position, as far as it tells.

    >>> call_problems("frozen", lambda path: True, ["path", "leaf"])
    ['frozen cannot be called with (path, leaf): too many positional arguments']
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C tell none
        return []
    try:
        signature.bind(*parameters)
    except TypeError as error:
        return [f"{name} cannot be called with ({', '.join(parameters)}): {error}"]
    return []


def is_word(value: Any, words: Collection[str]) -> bool:
    """Returns whether a value is one of those texts; what `==` says of arrays is no answer."""
    return isinstance(value, str) and value in words


def is_real(value: Any) -> bool:
    """Returns whether a value is a number, a fraction for example."""
    return isinstance(value, int | float | Real)  # the last alone takes ten times as long


def is_whole(value: Any) -> bool:
    """Returns whether a value is a whole number, also one of numpy's."""
    return isinstance(value, Integral)


def is_count(value: Any) -> bool:
    """Returns whether a value is a whole number and neither True nor False."""
    return is_whole(value) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Returns a value as text, cut where it is long."""
    try:
        return f"{value!s:.60}" if isinstance(value, Real) else f"{value!r:.60}"
    except ValueError:  # Python prints no whole number of more than 4,300 digits
        return "a number of thousands of digits"
