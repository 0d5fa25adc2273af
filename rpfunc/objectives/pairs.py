"""Preference pairs: examples 2i (chosen) and 2i+1 (rejected), that no cut parts."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.objectives.objective import weighted_mean
from rpfunc.objectives.targets import num_sequences, num_targets


def chosen_rejected(values: Float[Tensor, " batch"]) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
    """Returns the values of all chosen and of all rejected examples."""
    return values[0::2], values[1::2]


def num_pairs(batch: Batch) -> Tensor:
    """Returns how many pairs have a target in both completions, (), float64."""
    return num_sequences(batch) / 2


def pair_mean(losses: Float[Tensor, " pairs"], batch: Batch, total: Tensor) -> Tensor:
    """Returns Σ losses / total over the pairs that have targets."""
    scored = num_targets(batch)[0::2] > 0
    return weighted_mean(losses.where(scored, 0.0), total)
