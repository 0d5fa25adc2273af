"""Plans: layers grouped into stages, and how to choose the groups."""

from rpfunc.plan.costs import forward_flops
from rpfunc.plan.partition import partition
from rpfunc.plan.plan import Plan, Span

__all__ = ["Plan", "Span", "forward_flops", "partition"]
