"""Choosing how to stream from a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rpfunc.errors import PlanError
from rpfunc.model import Model
from rpfunc.objectives.objective import Objective
from rpfunc.stream.form import Stepping
from rpfunc.stream.rowwise import RowWise
from rpfunc.stream.streaming import Streaming


@dataclass(frozen=True)
class Choice:
    """A way to stream, its predicted peak in bytes, and what it costs in words."""

    streaming: Streaming
    peak_bytes: int
    note: str


def choose_streaming(
    model: Model,
    objective: Objective,
    num_rows: int,
    budget_bytes: int,
    peak_bytes: Callable[[Streaming], int],
    *,
    head_chunks: Sequence[int] = (512, 128, 32),
) -> Choice:
    """Returns the first way whose predicted peak is within the budget, fastest first.

    Whole rows come first (no recomputation), then layer by layer, then chunk by chunk if all layers can, each with
    chunks from large to small. `peak_bytes` predicts a way, for example through `rpfunc.plan.memory`.
    Raises PlanError naming the smallest peak found if none fits.
    """
    chunks = [size for size in (4096, 1024, 256, 64) if size < num_rows] or [num_rows]
    orders = ["layer", "chunk"] if _can_step(model) else ["layer"]
    ways = [Streaming()] + [
        Streaming(chunk, min(head_chunk, num_rows), order)  # type: ignore[arg-type]
        for order in orders
        for chunk, head_chunk in zip(chunks, _last_repeated(head_chunks, len(chunks)), strict=True)
    ]
    smallest: Choice | None = None
    for way in ways:
        choice = Choice(way, peak_bytes(way), _note(objective, way))
        if choice.peak_bytes <= budget_bytes:
            return choice
        if smallest is None or choice.peak_bytes < smallest.peak_bytes:
            smallest = choice
    assert smallest is not None
    raise PlanError(
        f"no way to stream fits {budget_bytes} bytes; the smallest peak is {smallest.peak_bytes} bytes, with "
        f"{smallest.streaming}"
    )


def _can_step(model: Model) -> bool:
    return all(isinstance(layer.form, Stepping) for layer in model.layers) and isinstance(
        model.layers[-1].form, RowWise
    )


def _last_repeated(sizes: Sequence[int], num: int) -> list[int]:
    return [*sizes, *[sizes[-1]] * num][:num]


def _note(objective: Objective, way: Streaming) -> str:
    passes = "one forward and one vjp" if way.chunk is None else "one forward, and one recomputation with each vjp"
    if objective.linear:
        return passes
    return f"{passes}; {objective.name} is not linear in its sums, so the head runs forward once more to find them"
