"""Which input rows an output row may see, and which it does: found by changing one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.model import Form
from rpfunc.stream import Attending, Bidirectional, Recurrent, RowWise, Stepping
from rpfunc.stream.flat import is_inexact

Run = Callable[[Any, Batch], Any]
"""(x, batch) -> output"""

ROUNDING = 1e-12
"""What a changed row may move another one by, next to the largest number: sums over all rows round (FFTs do)."""


def knows_rows(form: Form) -> bool:
    """Returns whether `form` says how rows depend on rows; if not (opaque), examples are all that may not meet."""
    return isinstance(form, Stepping | Bidirectional)


def offence(form: Form, run: Run, x: Any, batch: Batch, segments: str | None = None, *, seed: int = 0) -> str | None:
    """Returns in words the first (example, output row, input row) of `run` that `form` forbids; None: there is none.

    segments  name of a row leaf (B, T): rows of different values may not see each other
    Cost: two runs for each row of the batch. A dependence that a change of about 1 does not show is not seen.
    """
    same = batch.row[segments].cpu() if segments is not None and knows_rows(form) else None
    num_rows = batch.num_rows if knows_rows(form) else 1
    allowed = may_see(form, batch, num_rows, same)
    for source in ("x", "batch.row"):
        forbidden = _sees(form, run, x, batch, segments, source, seed) & ~allowed
        if forbidden.any():
            example, row, other, seen = forbidden.nonzero()[0].tolist()
            return words(form, example, row, other, seen, source, same, segments)
    return None


def may_see(
    form: Form, batch: Batch, num_rows: int, segments: Tensor | None = None
) -> Bool[Tensor, "examples rows examples rows"]:
    """Returns which output row (example, row) may see which input row (example, row)."""
    num_examples = batch.num_examples
    row, seen = torch.arange(num_rows)[:, None], torch.arange(num_rows)
    if isinstance(form, RowWise):
        rows = row == seen
    elif isinstance(form, Stepping):
        window = form.window if isinstance(form, Attending) else None
        rows = (seen <= row) & (True if window is None else row - seen < window)
    else:
        rows = torch.ones(num_rows, num_rows, dtype=torch.bool)
    allowed = rows.expand(num_examples, num_rows, num_rows)
    if segments is not None:
        allowed = allowed & (segments[:, :, None] == segments[:, None])
    example = torch.arange(num_examples)
    itself = (example[:, None] == example)[:, None, :, None]
    partner = (example[:, None] // batch.group_size == example // batch.group_size)[:, None, :, None]
    return (itself & allowed[:, :, None]) | (partner & ~itself)


def _sees(
    form: Form, run: Run, x: Any, batch: Batch, segments: str | None, source: str, seed: int
) -> Bool[Tensor, "examples rows examples rows"]:
    by_rows = knows_rows(form)
    num_examples, num_rows = batch.num_examples, batch.num_rows if by_rows else 1
    before = run(x, batch)
    generator = torch.Generator().manual_seed(seed)
    seen = torch.zeros(num_examples, num_rows, num_examples, num_rows, dtype=torch.bool)
    for example in range(num_examples):
        for row in range(num_rows):
            place = (example, row) if by_rows else (example,)
            if source == "x":
                after = run(tree.map(lambda leaf, place=place: changed(leaf, place, len(place), generator), x), batch)
            else:
                leaves = {
                    name: leaf
                    if name == segments
                    else tree.map(lambda part, place=place: changed(part, place, len(place), generator), leaf)
                    for name, leaf in batch.row.items()
                }
                after = run(x, replace(batch, row=leaves))
            seen[:, :, example, row] = differ(before, after, num_examples, num_rows)
    return seen


def changed(leaf: Any, place: tuple[Any, ...], num_dims: int, generator: torch.Generator) -> Any:
    """Returns the leaf with other values at `place`, an index into its first dimensions, of which it needs `num_dims`.

    Integers become others that the leaf has, which are valid.
    """
    if not isinstance(leaf, Tensor) or leaf.dim() < num_dims:
        return leaf
    other, part = leaf.clone(), leaf[place]
    if is_inexact(leaf):
        noise = torch.randn(part.shape, generator=generator)
        other[place] = part + (torch.complex(noise, noise) if leaf.is_complex() else noise).to(part)
    elif leaf.dtype == torch.bool:
        other[place] = ~part
    else:
        values = torch.unique(leaf)
        other[place] = values[(torch.searchsorted(values, part) + 1) % len(values)]
    return other


def differ(before: Any, after: Any, num_examples: int, num_rows: int) -> Bool[Tensor, "examples rows"]:
    """Returns which rows of two outputs differ by more than rounding."""
    differ = torch.zeros(num_examples, num_rows, dtype=torch.bool)
    for one, other in zip(tree.leaves(before), tree.leaves(after), strict=True):
        one, other = (wide(each).cpu() for each in (one, other))
        largest = max(one.abs().amax(), other.abs().amax()) if one.numel() else torch.ones(())
        moved = ~((one - other).abs() <= ROUNDING * largest)  # a NaN has moved
        differ |= moved.reshape(num_examples, num_rows, -1).any(dim=-1)
    return differ


def words(
    form: Form,
    example: int,
    row: int,
    other: int,
    seen: int,
    source: str,
    segments: Tensor | None,
    name: str | None,
) -> str:
    """Returns that an output row depends on an input row, and which rule forbids it."""

    def reads(output: str, inputs: str) -> str:
        return f"{output} depends on {inputs} ({source}), which it may not see"

    if not knows_rows(form):
        return f"{reads(f'output of example {example}', f'input of example {other}')}: {_EXAMPLES}"
    if other != example:
        return (
            reads(f"output row {row} of example {example}", f"input row {seen} of example {other}") + f": {_EXAMPLES}"
        )
    what = reads(f"output row {row}", f"input row {seen}")
    if isinstance(form, RowWise):
        return f"{what}: a row of a row-wise layer sees itself alone"
    if isinstance(form, Stepping) and seen > row:
        return f"{what}: it comes later{_mask(form)}"
    if isinstance(form, Attending) and form.window is not None and row - seen >= form.window:
        first = max(0, row - form.window + 1)
        return f"{what}: a window of {form.window} shows row {row} rows {first} to {row}{_mask(form)}"
    assert segments is not None  # no other rule is left
    pair = [int(segments[example, each]) for each in (row, seen)]
    return f"{what}: batch.row[{name!r}] has {pair[0]} at row {row} and {pair[1]} at row {seen}"


def _mask(form: Form) -> str:
    if isinstance(form, Attending):
        return "; `rows` must mask it, as rpfunc.stream.attend does"
    return "; `body` must not look ahead in its run of rows" if isinstance(form, Recurrent) else ""


_EXAMPLES = "examples never see each other, since a batch is cut between them"


def wide(leaf: Tensor) -> Tensor:
    """Returns the leaf detached, in float64 or complex128."""
    return leaf.detach().to(torch.complex128 if leaf.is_complex() else torch.float64)


def first_rows(found: Any, wanted: Any, tolerance: float) -> Iterator[tuple[int, int]]:
    """Yields each (example, row) where two outputs (B, T, ...) differ by over `tolerance` times the largest number."""
    for one, other in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        if one.dim() < 2 or not one.numel():
            continue
        one, other = wide(one), wide(other)
        moved = ~((one - other).abs() <= tolerance * other.abs().amax())
        yield from map(tuple, moved.reshape(*moved.shape[:2], -1).any(dim=-1).nonzero().tolist())
