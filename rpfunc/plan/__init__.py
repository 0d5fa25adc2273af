"""Plans: layers grouped into stages, and how to choose the groups."""

from rpfunc.plan.costs import forward_flops
from rpfunc.plan.partition import partition
from rpfunc.plan.plan import Plan, Span
from rpfunc.plan.predict import max_sequence, memory

__all__ = ["Plan", "Span", "forward_flops", "max_sequence", "memory", "partition"]
