"""The gradient of a model under an objective, by any plan on any workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.errors import BatchError, OptionsError
from rpfunc.model import Model, Params
from rpfunc.objectives.objective import Objective
from rpfunc.plan.plan import Plan
from rpfunc.runtime.dispatch import Dispatch
from rpfunc.runtime.iteration import Iteration, Work
from rpfunc.runtime.job import Job, Scheduler, choose_plan, choose_schedule
from rpfunc.runtime.workers import Cpu, Runtime
from rpfunc.schedule.task import Schedule
from rpfunc.schedule.timeline import Timeline
from rpfunc.stream.freeze import freeze
from rpfunc.stream.streaming import Order, Streaming
from rpfunc.stream.value import with_statistic

Workers = int | Sequence[Cpu] | Runtime | None
"""How many workers of one intra-op thread, their specs, a runtime to share, or None for the caller's own thread."""


@dataclass(frozen=True)
class Result:
    """What a gradient computation reports: the loss (), its denominator () (both float64), and when what ran."""

    loss: Tensor
    total: Tensor
    timeline: Timeline


class ValueAndGrad(Protocol):
    """What `value_and_grad` returns."""

    def __call__(self, params: Params, batch: Batch, total: Tensor | None = None) -> tuple[Result, dict[str, Any]]:
        """Returns (result, gradients with the structure of params, float32 or wider)."""


def value_and_grad(
    model: Model,
    objective: Objective,
    *,
    plan: Plan | str | None = None,
    workers: Workers = None,
    microbatches: int = 1,
    chunk: int | None = None,
    head_chunk: int | None = None,
    order: Order = "layer",
    keep_attention: int = 0,
    recompute: bool = True,
    frozen: tree.Mask | None = None,
    schedule: Schedule | Scheduler | str | None = None,
    blocks: int = 1,
) -> ValueAndGrad:
    """Returns fn(params, batch) -> (result, grads): the exact gradient of the objective's loss over the whole batch.

    plan          how layers are grouped into stages, also as text ("F0:4 X4:6 B0:2 B2:4"); None: everything fused on
                  one worker, else `plan.partition` of the layers' FLOPs, counted anew in each call
    workers       a number, specs such as [Cpu(threads=2)], a `Runtime` to reuse, or None: the caller's thread
    microbatches  runs of examples that go through the stages one by one; fewer where the batch has fewer examples
    chunk         rows worked on at a time by layers that stream; None: whole rows
    head_chunk    rows of the head, and so of logits, at a time; None: as `chunk`
    order         "layer" works one layer over all chunks, then the next; "chunk" takes one chunk through all layers of
                  a stage, and needs layers that do not look ahead
    keep_attention  of how many layers of a stage attention's results are kept between forward and backward, the last
                  ones: faster the longer the rows, for one activation of memory each (order "layer" with a chunk)
    recompute     keep only stage inputs between forward and backward (or, with False, what backward needs)
    frozen        a mask (see `tree.selector`) of leaves that get no gradient: None stands in their place
    schedule      which worker runs which task when: a `Schedule` or its text (with the plan that its stages are of), or
                  a function (work, num_workers) -> Schedule, as in `rpfunc.schedule`; None: slots dealt round robin
    blocks        runs of microbatches whose gradients are summed apart, and added up at the end: a stage's tasks of
                  different blocks may run at once. Each block holds gradients of the size of the parameters

    With the same microbatches, blocks, chunks, order and intra-op threads the result has the same bits for every plan,
    schedule, number of workers, timing and `recompute`. A stage's backward pass in two halves, I and W, costs twice a
    whole one: each does it all and keeps its half, since less would change bits.
    To accumulate a loss over several calls, give each the sum of their totals
    (`objective.total(objective.prepare(batch))`) as `total` and add up losses and gradients.
    Raises ModelError, BatchError, PlanError, ScheduleError or OptionsError before any work; an error inside a layer is
    raised as it is, with the task named in a note.
    """
    chosen = Plan.parse(plan) if isinstance(plan, str) else plan
    order_of_tasks = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    how = Streaming(chunk, head_chunk, order, keep_attention)
    job = Job(model, objective, chosen, microbatches, how, recompute, frozen, order_of_tasks, blocks)

    def function(params: Params, batch: Batch, total: Tensor | None = None) -> tuple[Result, dict[str, Any]]:
        with open_runtime(workers) as runtime:
            return start(job, params, batch, runtime, total).wait()

    return function


class Running:
    """A gradient computation in flight."""

    def __init__(self, iteration: Iteration, dispatch: Dispatch, total: Tensor) -> None:
        self._iteration, self._dispatch, self._total = iteration, dispatch, total

    def wait(self) -> tuple[Result, dict[str, Any]]:
        """Returns (result, grads) once all tasks have ended; raises what a task raised."""
        timeline = self._dispatch.wait()
        return Result(self._iteration.loss(), self._total, timeline), self._iteration.grads()

    def cancel(self) -> None:
        """Drops what has not begun and returns once the workers are free."""
        self._dispatch.cancel()


def start(job: Job, params: Params, batch: Batch, runtime: Runtime, total: Tensor | None = None) -> Running:
    """Starts one gradient computation; where slots are dealt like cards, the runtime's cursor moves on by them."""
    model, objective = job.model, job.objective
    model.check(params)
    if not isinstance(batch, Batch):
        raise BatchError(f"batch: is a {type(batch).__name__}, needs a Batch, as in Batch(row={{'tokens': tokens}})")
    prepared = objective.prepare(batch)
    total = objective.total(prepared) if total is None else torch.as_tensor(total, dtype=torch.float64)
    if not bool(torch.isfinite(total)):
        raise BatchError(f"batch: the {objective.name} objective's total is {total.item()}, it must be finite")
    plan = choose_plan(job, params, prepared, runtime.num_workers)
    pieces = prepared.microbatches(job.microbatches)
    schedule, workload = choose_schedule(job, plan, len(pieces), runtime.num_workers, runtime.cursor)
    if job.schedule is None:
        runtime.cursor = (runtime.cursor + len(plan.slots)) % runtime.num_workers
    pieces = with_statistic(model, objective, params, pieces, job.streaming)
    if job.frozen is not None:
        model, params = freeze(model, params, job.frozen)
    work = Work(model, objective, plan, job.streaming, job.recompute, workload)
    iteration = Iteration(work, params, pieces, total)
    return Running(iteration, Dispatch(runtime, schedule, workload, plan, iteration.run), total)


@contextmanager
def open_runtime(workers: Workers) -> Iterator[Runtime]:
    """Yields the runtime that `workers` means; threads that it starts end with the block."""
    if isinstance(workers, Runtime):
        yield workers
        return
    if not isinstance(workers, int | Sequence | None) or isinstance(workers, str | bool):
        raise OptionsError(
            f"workers: found {workers!r}, needs a number, specs such as [Cpu(threads=2)], a Runtime or None"
        )
    if isinstance(workers, int):
        if workers < 1:
            raise OptionsError(f"workers: found {workers}, it must be at least 1 (or None for the caller's thread)")
        workers = (Cpu(),) * workers
    with Runtime(workers or ()) as runtime:
        yield runtime
