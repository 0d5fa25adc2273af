"""Oracles and Hypothesis strategies for code built on rpfunc; `rpfunc.testing.strategies` needs hypothesis."""

from rpfunc.testing.layers import assert_streams
from rpfunc.testing.oracles import (
    assert_close,
    assert_computes,
    assert_equal,
    assert_equal_bits,
    gradient_error,
)

__all__ = [
    "assert_close",
    "assert_computes",
    "assert_equal",
    "assert_equal_bits",
    "assert_streams",
    "gradient_error",
]
