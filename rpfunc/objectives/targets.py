"""What a row is to predict: labels and all that is said about them, shifted by one row and cleaned, once.

Every row leaf that an objective reads (`labels`, `weights`, `old_logprobs`, `reference_logprobs`, `advantages`,
`old_values`, `returns`) is aligned with the token that it describes: place t is about token t. Row t of a model's
output predicts token t+1. `prepare` moves them all one row ahead, on whole rows, so that no cut can lose a target; the
moved leaves are called `targets` and `target_<name>`. Places without a label are set to 0 there, before any arithmetic,
so that whatever a user left in them (padding, nan, inf) has no effect on a loss or a gradient. The model's own logits
there have none either, as long as they are finite: to mask them, too, would take one more copy of a chunk of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.errors import BatchError

IGNORED = -100
"""The label of a token that is not to be predicted."""


def prepare(
    objective: str,
    batch: Batch,
    *,
    tokens: Mapping[str, str] | None = None,
    examples: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    pairs: bool = False,
) -> Batch:
    """Returns the batch with row leaves `targets` and `target_<name>`, and cleaned example leaves.

    tokens    floating row leaves (B, T) that `objective` needs, each with a word on where to get it (or '')
    examples  floating example leaves (B,) that it needs; set to 0 where the example has no target
    flags     boolean example leaves (B,) that it needs; set to False where the example has no target
    pairs     examples 2i and 2i+1 belong together: where one of them has no target, both are left out

    Raises BatchError listing every leaf that is missing or has another shape or dtype.
    """
    tokens, examples, flags = tokens or {}, examples or {}, flags or {}
    found = [_label_problem(batch)]
    found += [_row_problem(batch, name, _FLOATING, hint) for name, hint in tokens.items()]
    found += [_example_problem(batch, name, _FLOATING, hint) for name, hint in examples.items()]
    found += [_example_problem(batch, name, _BOOLEAN, hint) for name, hint in flags.items()]
    if pairs and batch.group_size != 2:
        found.append(f"needs a batch of pairs, chosen then rejected: group_size 2, found {batch.group_size}")
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise BatchError.listing(objective, problems)
    targets = _next_row(batch.row["labels"].long(), IGNORED)
    if pairs:
        scored = (targets != IGNORED).any(dim=1)
        complete = (scored[0::2] & scored[1::2]).repeat_interleave(2)
        targets = targets.masked_fill(~complete.unsqueeze(1), IGNORED)
    valid = targets != IGNORED
    scored = valid.any(dim=1)
    row = {f"target_{name}": _next_row(batch.row[name], 0.0).masked_fill(~valid, 0.0) for name in tokens}
    example = {name: batch.example[name].masked_fill(~scored, 0) for name in (*examples, *flags)}
    return replace(batch, row={**batch.row, "targets": targets, **row}, example={**batch.example, **example})


def is_target(batch: Batch) -> Bool[Tensor, "batch rows"]:
    """Returns which rows have a token to predict."""
    valid: Tensor = batch.row["targets"] != IGNORED
    return valid


def num_targets(batch: Batch) -> Int[Tensor, " batch"]:
    """Returns how many rows of each example have a token to predict."""
    return is_target(batch).sum(dim=1)


def num_tokens(batch: Batch) -> Tensor:
    """Returns how many rows have a token to predict, (), float64: the denominator of a mean over tokens."""
    return is_target(batch).sum().double()


def num_sequences(batch: Batch) -> Tensor:
    """Returns how many examples have a token to predict, (), float64: the denominator of a mean over sequences."""
    return (num_targets(batch) > 0).sum().double()


def per_target(sums: Tensor, batch: Batch) -> Tensor:
    """Returns sums (B,) divided by each example's number of targets (0 for an example that has none)."""
    return sums / num_targets(batch).clamp(min=1)


def _next_row(leaf: Tensor, fill: float) -> Tensor:
    return F.pad(leaf[:, 1:], (0, 1), value=fill)


class _Kind(NamedTuple):
    name: str
    fits: Callable[[torch.dtype], bool]


_INTEGER = _Kind("an integer", {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}.__contains__)
_FLOATING = _Kind("a floating-point", lambda dtype: dtype.is_floating_point)
_BOOLEAN = _Kind("a boolean", lambda dtype: dtype == torch.bool)


def _label_problem(batch: Batch) -> str | None:
    problem = _row_problem(batch, "labels", _INTEGER)
    if problem is None:
        labels = batch.row["labels"]
        unknown = labels[(labels < 0) & (labels != IGNORED)]
        if len(unknown):
            return f"row leaf 'labels' holds {unknown[0].item()}; a label is a token, at least 0, or {IGNORED} for none"
    return problem


def _row_problem(batch: Batch, name: str, kind: _Kind, hint: str = "") -> str | None:
    return _problem(f"row leaf {name!r} of shape (B, T)", batch.row.get(name), 2, kind, hint)


def _example_problem(batch: Batch, name: str, kind: _Kind, hint: str = "") -> str | None:
    return _problem(f"example leaf {name!r} of shape (B,)", batch.example.get(name), 1, kind, hint)


def _problem(wanted: str, leaf: Any, num_dims: int, kind: _Kind, hint: str) -> str | None:
    found = f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else "none"
    if isinstance(leaf, Tensor) and leaf.dim() == num_dims and kind.fits(leaf.dtype):
        return None
    return f"needs {wanted} and {kind.name} dtype, found {found}" + (f"; {hint}" if hint else "")
