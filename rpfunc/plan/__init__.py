"""Plans: layers grouped into stages, and how to choose the groups."""

from rpfunc.plan.choose import Choice, choose_streaming
from rpfunc.plan.flops import forward_flops
from rpfunc.plan.partition import partition
from rpfunc.plan.plan import Plan, Span
from rpfunc.plan.predict import max_sequence, memory

__all__ = ["Choice", "Plan", "Span", "choose_streaming", "forward_flops", "max_sequence", "memory", "partition"]
