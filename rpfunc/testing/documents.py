"""Rows that look at another document of a packed batch, wherever it stands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.model import Form
from rpfunc.testing.sight import Run, changed, differ, words


def foreign_document(form: Form, run: Run, x: Any, batch: Batch, segments: str, *, seed: int = 0) -> str | None:
    """Returns in words a row of `run` that depends on one of another document of its example; None: there is none.

    Cost: two runs for each document of the example that has most, and, once something is found, one for each row of
    that document. `rpfunc.testing.sight.offence` looks at single rows, and so at few of them.
    """
    ids: Tensor = batch.row[segments].cpu()
    numbers = torch.stack([torch.unique(example, return_inverse=True)[1] for example in ids])  # 0, 1, ... in each
    before = run(x, batch)
    for source in ("x", "batch.row"):
        for number in range(int(numbers.max()) + 1):
            document = numbers == number
            moved = _moved(run, x, batch, segments, document, source, before, seed) & ~document
            if moved.any():
                example, row = moved.nonzero()[0].tolist()
                seen = _seen(run, x, batch, segments, document, source, before, seed, (example, row))
                return words(form, example, row, example, seen, source, ids, segments)
    return None


def _seen(
    run: Run,
    x: Any,
    batch: Batch,
    segments: str,
    document: Tensor,
    source: str,
    before: Any,
    seed: int,
    place: tuple[int, int],
) -> int:
    """Returns the first row of the document that moves the output at `place` by itself; the first of all, if none."""
    example, row = place
    candidates = document[example].nonzero()[:, 0].tolist()
    for candidate in candidates:
        alone = torch.zeros_like(document)
        alone[example, candidate] = True
        if _moved(run, x, batch, segments, alone, source, before, seed)[example, row]:
            return int(candidate)
    return int(candidates[0])


def _moved(
    run: Run, x: Any, batch: Batch, segments: str, places: Tensor, source: str, before: Any, seed: int
) -> Tensor:
    """Returns which output rows (B, T) change with the input rows at `places` (B, T)."""
    generator = torch.Generator().manual_seed(seed)

    def change(structured: Any) -> Any:
        return tree.map(lambda leaf: changed(leaf, (places,), 2, generator), structured)

    if source == "x":
        after = run(change(x), batch)
    else:
        row = {name: leaf if name == segments else change(leaf) for name, leaf in batch.row.items()}
        after = run(x, replace(batch, row=row))
    return differ(before, after, *places.shape)
