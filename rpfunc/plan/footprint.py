"""About how many bytes a classic schedule keeps on the worker that needs most, for many plans at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rpfunc.plan.costs import LayerCost
from rpfunc.schedule.task import Schedule
from rpfunc.schedule.workload import Slot

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

Cuts = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""A row a plan: where its stages start, and the number of layers."""


class Moment(NamedTuple):
    """What a worker has while it computes a task: its slot, and microbatches held of its stages' inputs, cotangents."""

    slot: Slot
    inputs: tuple[int, ...]
    cotangents: tuple[int, ...]


def busiest_moments(schedule: Schedule) -> list[tuple[list[int], list[Moment]]]:
    """Returns for each worker its stages, and the moments among which is that of its most bytes.

    Left out are moments at which it has no more of anything than at another of the same slot.
    """
    found = []
    for tasks in schedule.workers:
        stages = sorted({task.stage for task in tasks})
        last = {(task.stage, task.microbatch): place for place, task in enumerate(tasks)}
        inputs, cotangents = Counter[int](), Counter[int]()
        seen: dict[Slot, set[tuple[int, ...]]] = defaultdict(set)
        held: dict[tuple[int, int], str] = {}
        for place, (stage, kind, microbatch) in enumerate(tasks):
            key = stage, microbatch
            inputs[stage] += key not in held
            cotangents[stage] += kind in "BI"
            held[key] = held.get(key, "") + kind
            seen[kind, stage].add((*(inputs[own] for own in stages), *(cotangents[own] for own in stages)))
            if last[key] == place:
                inputs[stage] -= 1
                cotangents[stage] -= "B" in held[key] or "I" in held[key]
        moments = [
            Moment(slot, counts[: len(stages)], counts[len(stages) :])
            for slot, all_counts in seen.items()
            for counts in _largest(all_counts)
        ]
        found.append((stages, moments))
    return found


def resident_bytes(moments: Sequence[tuple[list[int], list[Moment]]], layers: Sequence[LayerCost], cuts: Cuts) -> Bytes:
    """Returns for each row of cuts the bytes of the worker that has most, if stages stay with all that they have.

    What waits for a transfer to end, or has come early, is not part of it: a lower bound in practice.
    """
    sizes = _Sizes.of(layers, cuts)
    most = np.zeros(len(cuts))
    for stages, own in moments:
        bound = (sizes.parameters + sizes.gradients)[stages].sum(axis=0)
        for (kind, stage), inputs, cotangents in own:
            held = np.array(inputs) @ sizes.before[stages] + np.array(cotangents) @ sizes.after[stages]
            output = {"F": sizes.after, "W": np.zeros_like(sizes.after)}.get(kind, sizes.before)
            residuals = 0 if kind == "F" else sizes.residuals[stage]
            np.maximum(most, bound + held + output[stage] + sizes.largest[stage] + residuals, out=most)
    return most


def streamed_bytes(layers: Sequence[LayerCost], cuts: Cuts) -> Bytes:
    """Returns for each row of cuts the bytes of the slot that takes most, with the parameters of one as large ahead."""
    sizes = _Sizes.of(layers, cuts)
    return np.asarray((2 * sizes.parameters + sizes.gradients + sizes.largest + sizes.residuals).max(axis=0))


class _Sizes(NamedTuple):
    """Bytes of each stage (row) with each plan (column); `largest` of its layers' outputs."""

    before: Bytes
    after: Bytes
    parameters: Bytes
    gradients: Bytes
    residuals: Bytes
    largest: Bytes

    @classmethod
    def of(cls, layers: Sequence[LayerCost], cuts: Cuts) -> _Sizes:
        starts, stops = cuts[:, :-1].T, cuts[:, 1:].T
        outputs = np.array([layer.output_bytes for layer in layers])
        handed_on = np.array([0.0, *outputs[:-1], 0.0])

        def summed(field: str) -> Bytes:
            sums = np.array([0.0, *accumulate(getattr(layer, field) for layer in layers)])
            return np.asarray(sums[stops] - sums[starts])

        return cls(
            handed_on[starts],
            handed_on[stops],
            summed("parameter_bytes"),
            summed("gradient_bytes"),
            summed("residual_bytes"),
            np.array([np.maximum.reduceat(outputs, own[:-1]) for own in cuts]).T,
        )


def _largest(counts: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns those that no other reaches in every place."""
    rows = np.array(sorted(counts))
    below = (rows[:, None] <= rows[None]).all(axis=2).sum(axis=1)  # itself among them
    return [tuple(row) for row in rows[below == 1].tolist()]
