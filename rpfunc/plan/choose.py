"""Choosing how to stream from a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rpfunc.checks import count_problems, rate_problems, size_problems
from rpfunc.errors import PlanError
from rpfunc.model import Model
from rpfunc.objectives.objective import Objective
from rpfunc.stream.attending import Attending
from rpfunc.stream.chunk_major import can_step
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
    chunks: Sequence[int] = (4096, 1024, 256, 64),
    head_chunks: Sequence[int] = (512, 128, 32),
) -> Choice:
    """Returns the first way whose predicted peak is within the budget, fastest first.

    Whole rows come first (no recomputation), then layer by layer, then chunk by chunk if all layers can. In an order,
    chunks go from large to small, and with each of them the head's, which are no larger. To a way that fits layer by
    layer, attention is kept of as many rows as fit, in eighths, too. `peak_bytes` predicts a way, for example through
    `rpfunc.plan.memory`; it is asked for each way until one fits, so at worst some dozens of times.
    Raises PlanError for numbers that cannot work and, naming the way that needs least, if none fits.
    """
    problems = count_problems({"num_rows": num_rows}) + rate_problems({"budget_bytes": budget_bytes})
    for name, sizes in {"chunks": chunks, "head_chunks": head_chunks}.items():
        problems += [] if sizes else [f"{name} is empty, it must hold a number of rows, for example 128"]
        problems += count_problems({f"{name}[{index}]": size for index, size in enumerate(sizes)})
    if problems:
        raise PlanError.listing("choose_streaming", problems)
    smallest: Choice | None = None
    for way in _ways(model, num_rows, chunks, head_chunks):
        choice = Choice(way, _peak(peak_bytes, way), _note(objective, way))
        if choice.peak_bytes <= budget_bytes:
            return _keeping(model, choice, budget_bytes, peak_bytes)
        if smallest is None or choice.peak_bytes < smallest.peak_bytes:
            smallest = choice
    assert smallest is not None
    raise PlanError(
        f"no way to stream fits {budget_bytes} bytes; the smallest peak is {smallest.peak_bytes} bytes, with "
        f"{smallest.streaming}"
    )


def _ways(model: Model, num_rows: int, chunks: Sequence[int], head_chunks: Sequence[int]) -> Iterator[Streaming]:
    yield Streaming()
    sizes = sorted({min(size, num_rows) for size in chunks}, reverse=True)
    for order in ("layer", "chunk") if can_step(model.layers) else ("layer",):
        for chunk in sizes:
            for head_chunk in sorted({min(size, chunk) for size in head_chunks}, reverse=True):
                yield Streaming(chunk, head_chunk, order)


def _keeping(model: Model, choice: Choice, budget_bytes: int, peak_bytes: Callable[[Streaming], int]) -> Choice:
    """Returns the choice with attention kept of as many eighths of the rows as fit; more take more."""
    if choice.streaming.chunk is None or choice.streaming.order == "chunk":
        return choice
    low, high = 0, 8 if any(isinstance(layer.form, Attending) for layer in model.layers) else 0
    while low < high:
        kept = (low + high + 1) // 2
        way = replace(choice.streaming, keep_attention=kept / 8)
        found = _peak(peak_bytes, way)
        if found <= budget_bytes:
            low, choice = kept, replace(choice, streaming=way, peak_bytes=found)
        else:
            high = kept - 1
    return choice


def _peak(peak_bytes: Callable[[Streaming], int], way: Streaming) -> int:
    found = peak_bytes(way)
    if problems := size_problems({f"the answer of peak_bytes({way})": found}):
        raise PlanError.listing("choose_streaming", problems)
    return found


def _note(objective: Objective, way: Streaming) -> str:
    passes = "one forward and one vjp" if way.chunk is None else "one forward, and one recomputation with each vjp"
    if objective.linear:
        return passes
    return f"{passes}; {objective.name} is not linear in its sums, so the head runs forward once more to find them"
