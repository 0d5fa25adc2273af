"""rpfunc: pipeline schedules and exact streamed gradients for pure PyTorch functions."""

from rpfunc import objectives, plan, random, reference, schedule, stream, tree
from rpfunc.batch import Batch
from rpfunc.model import Layer, Model
from rpfunc.plan import Plan
from rpfunc.runtime import Cpu, Result, Runtime, value_and_grad

__all__ = [
    "Batch",
    "Cpu",
    "Layer",
    "Model",
    "Plan",
    "Result",
    "Runtime",
    "objectives",
    "plan",
    "random",
    "reference",
    "schedule",
    "stream",
    "tree",
    "value_and_grad",
]
