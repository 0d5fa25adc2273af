"""What a worker's memory has to hold in an iteration, known before any of its tasks begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.errors import MemoryLimitError
from rpfunc.meter import Following, Meter, storages
from rpfunc.plan.predict import on_few_chunks, without_data
from rpfunc.runtime.context import CallersContext
from rpfunc.runtime.iteration import Iteration
from rpfunc.runtime.job import Job
from rpfunc.runtime.operations import Line
from rpfunc.runtime.outline import Alike, Outline
from rpfunc.runtime.tasks import Inputs, Work, perform
from rpfunc.schedule.task import Task
from rpfunc.stream.freeze import Frozen, cast

Slot = tuple[int, str]
"""Stage and kind of a task."""


class Size(NamedTuple):
    """Bytes that a task of a slot reads, makes and hands on.

    params   where they are in the compute dtype
    casts    those of them that were in another one
    working  the most that lives of what it makes, outputs and new sums included
    """

    params: int
    casts: int
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


@dataclass(frozen=True)
class Question:
    """What the sizes of an iteration's tasks follow from: equal ones have one answer. Holds none of its tensors.

    work          the model and the objective are told by identity, for what they compute
    params        of the first iteration: later ones have the same shapes, but may be still in the making
    microbatches  the first two
    setting       what torch takes from its surroundings: the caller's context, and the dtype that is the default
    """

    work: Alike
    params: Outline
    microbatches: tuple[Outline, ...]
    total: Outline
    setting: tuple[CallersContext, torch.dtype]

    @classmethod
    def of(
        cls, job: Job, work: Work, is_scaled: bool, params: Outline, microbatches: Sequence[Batch], total: Tensor
    ) -> Question:
        """Returns the question for an iteration of a job."""
        load = work.workload
        how = work.plan, work.streaming, work.recompute, work.compute_dtype
        tasks = load.num_microbatches, load.num_blocks, load.halved
        return cls(
            Alike((id(job.model), id(job.objective), is_scaled, how, tasks), (job, work)),
            params,
            tuple(map(Outline.of_batch, microbatches[:2])),
            Outline.of(total),
            (CallersContext.here(), torch.get_default_dtype()),
        )


def remembering(most: int = 8) -> Callable[[Question], Mapping[Slot, Size]]:
    """Returns `sizes_of` with a memory of the last `most` answers, each of which takes a second or more to find."""
    known = lru_cache(maxsize=most)(sizes_of)

    def sizes(question: Question) -> Mapping[Slot, Size]:
        try:
            hash(question)
        except TypeError:  # something of the caller's in it has no hash
            return sizes_of(question)
        return known(question)

    return sizes


def sizes_of(question: Question) -> dict[Slot, Size]:
    """Returns the size of each slot, the larger of its first two tasks: the second finds gradients to add to.

    The tasks' own code is run on tensors that have shapes and no data, as `rpfunc.plan.memory` does. Source: own.
    """
    work: Work = question.work.value[1]
    work = replace(work, streaming=on_few_chunks(work.model, work.streaming))
    found: dict[Slot, Size] = {}
    with without_data(), torch.no_grad():
        pieces = [Batch(**outline.fill()) for outline in question.microbatches]
        iteration = Iteration(work, question.params.fill(), pieces, question.total.fill())
        for task in work.workload.tasks:
            if task.microbatch < len(pieces):
                size = _carry_out(iteration, task)
                known = found.get(task[:2], size)
                found[task[:2]] = Size(*map(max, known, size))
    return found


def _carry_out(iteration: Iteration, task: Task) -> Size:
    work, place, meter = iteration.work, iteration.place(task), Meter()
    params, inputs = iteration.subtrees([task]), iteration.inputs(task)
    casts = 0
    if work.compute_dtype is not None:
        others = [leaf for leaf in tensors_of(params) if leaf.dtype != work.compute_dtype]
        casts = sum(leaf.numel() for leaf in others) * work.compute_dtype.itemsize
        params = tree.map(lambda leaf: cast(leaf, work.compute_dtype), params)
    read = _copied(values_of(inputs))
    with Following(meter):
        outputs, sums = perform(work, task, params, inputs, iteration.sums(place))
    del inputs
    iteration.store(task, outputs)
    iteration.store_sums(place, sums)
    handed_on = _bytes((dict(outputs.activations), outputs.cotangent, outputs.loss))
    return Size(_copied(params), casts, _bytes(sums), read, handed_on, meter.peak_bytes)


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
        return Need(max(size.casts for size in of_runs), 0, 0, 0, working, heaviest)

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


def values_of(inputs: Inputs) -> Any:
    """Returns the inputs that are copied to a device, as a pytree."""
    batch = inputs.batch
    leaves = (batch.row, batch.example, batch.group, batch.constant)
    return dict(inputs.activations), inputs.cotangent, tuple(map(dict, leaves)), inputs.total


def tensors_of(structured: Any) -> list[Tensor]:
    """Returns the tensors of a pytree, frozen ones too."""
    leaves = [leaf.tensor if isinstance(leaf, Frozen) else leaf for leaf in tree.leaves(structured)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _copied(structured: Any) -> int:
    """Returns the bytes of a copy, in which no two tensors share memory."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors_of(structured))


def _bytes(structured: Any) -> int:
    return sum({id(storage): storage.nbytes() for storage in storages(tensors_of(structured))}.values())
