"""Training: joined steps, a loop with evaluation and checkpoints, byte-level data."""

from rpfunc.train.steps import StepResult, train_steps

__all__ = ["StepResult", "train_steps"]
