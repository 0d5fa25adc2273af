"""Oracles and Hypothesis strategies for code built on rpfunc.

`assert_streams_objective`, when called, and `rpfunc.testing.strategies` need hypothesis (the `test` extra).
"""

from rpfunc.testing.layers import assert_streams
from rpfunc.testing.objectives import assert_streams_objective
from rpfunc.testing.oracles import (
    assert_close,
    assert_computes,
    assert_equal,
    assert_equal_bits,
    gradient_error,
)
from rpfunc.testing.traces import races

__all__ = [
    "assert_close",
    "assert_computes",
    "assert_equal",
    "assert_equal_bits",
    "assert_streams",
    "assert_streams_objective",
    "gradient_error",
    "races",
]
