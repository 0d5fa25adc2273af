"""The gradient of a model under an objective, by any plan on any workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.errors import BatchError, OptionsError
from rpfunc.model import Model, Params
from rpfunc.objectives.objective import Objective
from rpfunc.plan.costs import forward_flops
from rpfunc.plan.partition import partition
from rpfunc.plan.plan import Plan
from rpfunc.runtime.dispatch import Dispatch
from rpfunc.runtime.iteration import Iteration, Work
from rpfunc.runtime.workers import Cpu, Runtime
from rpfunc.schedule.round_robin import round_robin
from rpfunc.schedule.timeline import Timeline

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
    plan: Plan | None = None,
    workers: Workers = None,
    microbatches: int = 1,
    chunk: int | None = None,
    recompute: bool = True,
) -> ValueAndGrad:
    """Returns fn(params, batch) -> (result, grads): the exact gradient of the objective's loss over the whole batch.

    plan          how layers are grouped into stages; None: everything fused on one worker, else `plan.partition` of
                  the layers' FLOPs
    workers       a number, specs such as [Cpu(threads=2)], a `Runtime` to reuse, or None: the caller's thread
    microbatches  runs of examples that go through the stages one by one; fewer where the batch has fewer examples
    chunk         rows worked on at a time by layers that stream and by the head; None: whole rows
    recompute     keep only stage inputs between forward and backward (or, with False, what backward needs)

    With the same microbatches, chunk and intra-op threads the result has the same bits for every plan, number of
    workers, timing and `recompute`. To accumulate a loss over several calls, give each the sum of their totals
    (`objective.total(objective.prepare(batch))`) as `total` and add up losses and gradients.
    Raises ModelError, BatchError, PlanError or OptionsError; an error inside a layer is raised as it is, with the
    task named in a note.
    """
    check_options(microbatches, chunk)

    def function(params: Params, batch: Batch, total: Tensor | None = None) -> tuple[Result, dict[str, Any]]:
        with open_runtime(workers) as runtime:
            work = Work(model, objective, choose_plan(plan, model, params, batch, runtime), chunk, recompute)
            return start(work, params, batch, microbatches, runtime, total).wait()

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


def start(
    work: Work, params: Params, batch: Batch, microbatches: int, runtime: Runtime, total: Tensor | None = None
) -> Running:
    """Starts one gradient computation and advances the runtime's cursor by its slots."""
    work.model.check(params)
    prepared = work.objective.prepare(batch)
    total = work.objective.total(prepared) if total is None else total
    if not bool(torch.isfinite(total)):
        raise BatchError(f"batch: the {work.objective.name} objective's total is {total.item()}, it must be finite")
    pieces = prepared.microbatches(microbatches)
    schedule = round_robin(work.plan, runtime.num_workers, len(pieces), runtime.cursor)
    runtime.cursor = (runtime.cursor + len(work.plan.slots)) % runtime.num_workers
    iteration = Iteration(work, params, pieces, total)
    return Running(iteration, Dispatch(runtime, schedule, work.plan, iteration.run), total)


@contextmanager
def open_runtime(workers: Workers) -> Iterator[Runtime]:
    """Yields the runtime that `workers` means; threads that it starts end with the block."""
    if isinstance(workers, Runtime):
        yield workers
        return
    if isinstance(workers, int):
        if workers < 1:
            raise OptionsError(f"workers: found {workers}, it must be at least 1 (or None for the caller's thread)")
        workers = (Cpu(),) * workers
    with Runtime(workers or ()) as runtime:
        yield runtime


def choose_plan(plan: Plan | None, model: Model, params: Params, batch: Batch, runtime: Runtime) -> Plan:
    """Returns `plan`, checked against the model, or the one that suits the runtime's workers."""
    if plan is None:
        model.check(params)
        if runtime.num_workers == 1:
            return Plan.single(model.num_layers)
        return partition(forward_flops(model, params, batch), runtime.num_workers)
    plan.check(model.num_layers)
    return plan


def check_options(microbatches: int, chunk: int | None) -> None:
    """Raises OptionsError listing what is below 1."""
    problems = []
    if microbatches < 1:
        problems.append(f"microbatches is {microbatches}, it must be at least 1")
    if chunk is not None and chunk < 1:
        problems.append(f"chunk is {chunk}, it must be at least 1 row (or None for whole rows)")
    if problems:
        raise OptionsError.listing("options", problems)
