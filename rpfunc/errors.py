"""Every error that rpfunc raises on bad input: a `ValueError` that lists all faults at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Self


class RpfuncError(ValueError):
    """Base of rpfunc's errors; catch it to catch them all.

    >>> raise ModelError.listing("model", ["layer 'a' appears twice"])
    Traceback (most recent call last):
    rpfunc.errors.ModelError: model: layer 'a' appears twice
    """

    @classmethod
    def listing(cls, subject: str, problems: Sequence[str]) -> Self:
        """Returns an error that names `subject` and every one of `problems` (at least one)."""
        if len(problems) == 1:
            return cls(f"{subject}: {problems[0]}")
        lines = "".join(f"\n  - {problem}" for problem in problems)
        return cls(f"{subject}: {len(problems)} problems{lines}")


class TreeError(RpfuncError):
    """Two pytrees differ in structure, shape or dtype."""


class BatchError(RpfuncError):
    """A batch's leaves do not fit together, or a cut would not fit the batch."""


class ModelError(RpfuncError):
    """A model's layers, or the parameters given to it, do not fit together."""


class PlanError(RpfuncError):
    """A plan does not cover the model, or asks for what its layers cannot do."""


class ScheduleError(RpfuncError):
    """A schedule misses, repeats or misplaces a task, or would never end."""


class StateError(RpfuncError):
    """A training state was used after it had been donated, or after an update broke it."""


class OptionsError(RpfuncError):
    """An option has a value that cannot work."""


class GradientError(RpfuncError):
    """A loss or gradient is not finite, and the caller asked to be told."""


class MemoryLimitError(RpfuncError):
    """A worker would need, or has taken, more memory than it may."""


class CheckpointError(RpfuncError):
    """A checkpoint cannot be read, or belongs to something else."""


class OptimizerError(RpfuncError):
    """An optimizer was given a number, tree or state that it cannot work with."""


def note(error: BaseException, text: str) -> None:
    """Adds a note to somebody's error. One that takes none, as a class may, stays as it is: it matters more."""
    with suppress(Exception):
        error.add_note(f"rpfunc: {text}")
