"""rpfunc: pipeline schedules and exact streamed gradients for pure PyTorch functions."""

from rpfunc import memory, objectives, optim, plan, random, reference, schedule, stream, tree
from rpfunc.batch import Batch
from rpfunc.generation import generate
from rpfunc.model import Layer, Model
from rpfunc.plan import Plan
from rpfunc.runtime import Cpu, Cuda, Link, Result, Runtime, State, apply, value_and_grad
from rpfunc.stream.logprobs import logprobs
from rpfunc.stream.value import value
from rpfunc.train import StepResult, train_steps

__all__ = [
    "Batch",
    "Cpu",
    "Cuda",
    "Layer",
    "Link",
    "Model",
    "Plan",
    "Result",
    "Runtime",
    "State",
    "StepResult",
    "apply",
    "generate",
    "logprobs",
    "memory",
    "objectives",
    "optim",
    "plan",
    "random",
    "reference",
    "schedule",
    "stream",
    "train_steps",
    "tree",
    "value",
    "value_and_grad",
]
