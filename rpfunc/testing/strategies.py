"""Hypothesis strategies for what rpfunc is cut by: plans, chunks, microbatches, workers. Needs the `test` extra."""

from __future__ import annotations

from itertools import chain, combinations, product

from hypothesis import strategies as st

from rpfunc.plan import LayerCost, Plan
from rpfunc.schedule import Schedule, Task
from rpfunc.schedule.task import KINDS


def every_plan(num_layers: int) -> list[Plan]:
    """Returns all plans for `num_layers` layers: 1 + (4^(num_layers-1) - 1) / 3 of them, the fused-only plan first.

    >>> len(every_plan(4))
    22
    """
    plans = [Plan.single(num_layers)]
    for fused_start in range(1, num_layers):
        inner = range(1, fused_start)
        cuts = list(chain.from_iterable(combinations(inner, size) for size in range(len(inner) + 1)))
        for forward, backward in product(cuts, repeat=2):
            plans.append(Plan.cut(num_layers, [0, *forward, fused_start], [0, *backward, fused_start]))
    return plans


def every_symmetric_plan(num_layers: int) -> list[Plan]:
    """Returns all plans that cut forward and backward alike and fuse nothing: 2^(num_layers-1) of them.

    >>> len(every_symmetric_plan(4))
    8
    """
    inner = range(1, num_layers)
    cuts = chain.from_iterable(combinations(inner, size) for size in range(num_layers))
    return [Plan.symmetric(num_layers, [0, *starts]) for starts in cuts]


@st.composite
def plans(draw: st.DrawFn, num_layers: int) -> Plan:
    """Draws any plan for `num_layers` layers: where the fused stage starts, forward cuts, backward cuts."""
    fused_start = draw(st.integers(0, num_layers - 1))
    if fused_start == 0:
        return Plan.single(num_layers)
    inner = st.sets(st.integers(1, fused_start - 1)) if fused_start > 1 else st.just(set[int]())
    forward, backward = (sorted(draw(inner)) for _ in range(2))
    return Plan.cut(num_layers, [0, *forward, fused_start], [0, *backward, fused_start])


def layer_costs(num_layers: st.SearchStrategy[int], most: int = 9) -> st.SearchStrategy[list[LayerCost]]:
    """Draws costs of layers, each of their numbers an integer from 0 to `most`, whatever the others are."""
    numbers = st.tuples(*[st.integers(0, most)] * 9).map(lambda drawn: LayerCost(*drawn))
    return num_layers.flatmap(lambda num: st.lists(numbers, min_size=num, max_size=num))


def chunks(num_rows: int) -> st.SearchStrategy[int | None]:
    """Draws a chunk size from 1 to beyond `num_rows`, or None for whole rows."""
    return st.none() | st.integers(1, num_rows + 5)


def microbatches(most: int = 8) -> st.SearchStrategy[int]:
    """Draws a number of microbatches."""
    return st.integers(1, most)


def workers(most: int = 4) -> st.SearchStrategy[int | None]:
    """Draws a number of workers, or None for the caller's own thread."""
    return st.none() | st.integers(1, most)


def tasks() -> st.SearchStrategy[Task]:
    """Draws a task of any kind."""
    return st.builds(Task, st.integers(0, 99), st.sampled_from(KINDS), st.integers(0, 999))


def schedules() -> st.SearchStrategy[Schedule]:
    """Draws any list of tasks for each of one or more workers, sensible or not."""
    worker = st.lists(tasks(), max_size=6).map(tuple)
    return st.lists(worker, min_size=1, max_size=4).map(lambda workers: Schedule(tuple(workers)))
