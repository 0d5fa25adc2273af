"""What a worker's memory has to hold in an iteration, known before any of its tasks begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.errors import MemoryLimitError
from rpfunc.meter import Following, Meter, storages
from rpfunc.model import Params
from rpfunc.plan.predict import on_few_chunks
from rpfunc.runtime.iteration import Iteration
from rpfunc.runtime.operations import Line
from rpfunc.runtime.tasks import Work, perform
from rpfunc.schedule.task import Task
from rpfunc.stream.freeze import Frozen

Slot = tuple[int, str]
"""Stage and kind of a task."""


class Size(NamedTuple):
    """Bytes that a task of a slot reads, makes and hands on.

    params   where they are in the compute dtype
    working  the most that lives of what it makes, outputs and new sums included
    """

    params: int
    sums: int
    inputs: int
    outputs: int
    working: int


class Need(NamedTuple):
    """Bytes that a worker's memory has to hold at most.

    params, sums     of two runs that follow each other; sharing the host's memory, parameters that are cast for one run
    inputs, outputs  of two tasks that follow each other; none where the host's memory is shared
    working          of the task that needs most, `task`
    """

    params: int
    sums: int
    inputs: int
    outputs: int
    working: int
    task: Task

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.params + self.sums + self.inputs + self.outputs + self.working


def sizes_of(work: Work, params: Params, microbatches: Sequence[Batch], total: Tensor) -> dict[Slot, Size]:
    """Returns the size of each slot, the larger of its first two tasks: the second finds gradients to add to.

    The tasks' own code is run on tensors that have shapes and no data, as `rpfunc.plan.memory` does. Source: own.
    """
    work = replace(work, streaming=on_few_chunks(work.model, work.streaming))
    found: dict[Slot, Size] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():

        def shape_only(leaf: Any) -> Any:
            if isinstance(leaf, Frozen):
                return Frozen(shape_only(leaf.tensor))
            return fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf

        pieces = [piece.map(shape_only) for piece in microbatches[:2]]
        iteration = Iteration(work, tree.map(shape_only, dict(params)), pieces, shape_only(total))
        for task in work.workload.tasks:
            if task.microbatch < len(pieces):
                size = _carry_out(iteration, task)
                known = found.get(task[:2], size)
                found[task[:2]] = Size(*map(max, known, size))
    return found


def _carry_out(iteration: Iteration, task: Task) -> Size:
    work, place, meter = iteration.work, iteration.place(task), Meter()
    params, inputs = iteration.subtrees([task]), iteration.inputs(task)
    if work.compute_dtype is not None:
        params = tree.map(lambda leaf: cast(leaf, work.compute_dtype), params)
    read = _bytes((dict(inputs.activations), inputs.cotangent, inputs.batch.row))
    with Following(meter):
        outputs, sums = perform(work, task, params, inputs, iteration.sums(place))
    del inputs
    iteration.store(task, outputs)
    iteration.store_sums(place, sums)
    handed_on = _bytes((dict(outputs.activations), outputs.cotangent, outputs.loss))
    return Size(_bytes(params), _bytes(sums), read, handed_on, meter.peak_bytes)


def needs(
    lines: Sequence[Line], work: Work, sizes: Mapping[Slot, Size], shares_memory: Sequence[bool]
) -> list[Need | None]:
    """Returns what each worker's memory has to hold; None where it has no task."""
    return [_need(line, work, sizes, shared) for line, shared in zip(lines, shares_memory, strict=True)]


def _need(line: Line, work: Work, sizes: Mapping[Slot, Size], shared: bool) -> Need | None:
    tasks = [operation.task for operation in line["compute"]]
    if not tasks:
        return None
    heaviest = max(tasks, key=lambda task: sizes[task[:2]].working)
    of_tasks = [sizes[task[:2]] for task in tasks]
    runs = list(dict.fromkeys(operation.run for operation in line["compute"]))
    of_runs = [sizes[run[0][:2]] for run in runs]
    working = sizes[heaviest[:2]].working
    if shared:
        casts = max(size.params for size in of_runs) if work.compute_dtype is not None else 0
        return Need(casts, 0, 0, 0, working, heaviest)

    def pairs(values: Sequence[int]) -> int:
        # the next iteration's first follows this one's last
        return max(a + b for a, b in pairwise([*values, values[0]]))

    return Need(
        pairs([size.params for size in of_runs]),
        pairs([size.sums for size in of_runs]),
        pairs([size.inputs for size in of_tasks]),
        pairs([size.outputs for size in of_tasks]),
        working,
        heaviest,
    )


def check_room(found: Sequence[Need | None], limits: Sequence[int | None]) -> None:
    """Raises MemoryLimitError naming every worker whose limit is below its need."""
    problems = [
        f"worker {worker} needs {need.total_bytes:,} bytes (parameters {need.params:,}, gradients {need.sums:,}, "
        f"inputs {need.inputs:,}, outputs {need.outputs:,}, and {need.working:,} while it works on {need.task}), its "
        f"memory_bytes is {limit:,}; memory_bytes={need.total_bytes} would do, smaller stages, microbatches or chunks "
        "need less"
        for worker, (need, limit) in enumerate(zip(found, limits, strict=True))
        if need is not None and limit is not None and need.total_bytes > limit
    ]
    if problems:
        raise MemoryLimitError.listing("worker memory", problems)


def cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    """Returns a leaf, frozen or not, in another dtype."""
    return Frozen(leaf.tensor.to(dtype)) if isinstance(leaf, Frozen) else leaf.to(dtype)


def _bytes(structured: Any) -> int:
    leaves = [leaf.tensor if isinstance(leaf, Frozen) else leaf for leaf in tree.leaves(structured)]
    return sum({id(storage): storage.nbytes() for storage in storages(leaves)}.values())
