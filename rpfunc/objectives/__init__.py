"""Objectives F(Σ over rows of s): what a model's output is scored by."""

from rpfunc.objectives.objective import Objective, weighted_mean
from rpfunc.objectives.sft import sft

__all__ = ["Objective", "sft", "weighted_mean"]
