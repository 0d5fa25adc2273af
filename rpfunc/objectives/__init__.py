"""Objectives F(Σ over rows of s): what a model's output is scored by."""

from rpfunc.objectives.dpo import dpo
from rpfunc.objectives.grpo import grpo
from rpfunc.objectives.kto import kto
from rpfunc.objectives.objective import Objective, weighted_mean
from rpfunc.objectives.orpo import orpo
from rpfunc.objectives.ppo import ppo
from rpfunc.objectives.sft import sft
from rpfunc.objectives.simpo import simpo
from rpfunc.objectives.targets import IGNORED

__all__ = ["IGNORED", "Objective", "dpo", "grpo", "kto", "orpo", "ppo", "sft", "simpo", "weighted_mean"]
