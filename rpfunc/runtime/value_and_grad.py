"""The gradient of a model under an objective, by any plan on any workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.checks import MOST, is_count, is_real, plain_number, shown
from rpfunc.errors import BatchError, OptionsError
from rpfunc.model import Model, Params
from rpfunc.objectives.objective import Objective
from rpfunc.plan.plan import Plan
from rpfunc.runtime.job import Job, Scheduler, choose_plan, grain
from rpfunc.runtime.session import Result, Session, prepare
from rpfunc.runtime.tasks import Recompute
from rpfunc.runtime.workers import Cpu, Cuda, Runtime
from rpfunc.schedule.building import MOST_WORKERS
from rpfunc.schedule.task import Schedule
from rpfunc.stream.freeze import freeze
from rpfunc.stream.streaming import Order, Streaming

Workers = int | Sequence[Cpu | Cuda] | Runtime | None
"""How many workers of one intra-op thread, their specs, a runtime to share, or None for the caller's own thread."""


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
    keep_attention: float = 0.0,
    recompute: bool | Recompute = True,
    frozen: tree.Mask | None = None,
    schedule: Schedule | Scheduler | str | None = None,
    blocks: int = 1,
    compute_dtype: torch.dtype | None = None,
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
    keep_attention  share of the rows, 0 to 1, the last ones, whose results of attention are kept between forward and
                  backward: faster the longer the rows, for that share of an activation in each layer of a stage (order
                  "layer" with a chunk); half of the rows spare three quarters of the second attention
    recompute     what is kept between forward and backward: "stage" (True), each stage's input, the rest is computed
                  again; "layer", each layer's input; "none" (False), all that backward needs, on workers that share the
                  host's memory
    frozen        a mask (see `tree.selector`) of leaves that get no gradient: None stands in their place
    schedule      which worker runs which task when: a `Schedule` or its text (with the plan that its stages are of), or
                  a function (work, num_workers) -> Schedule, as in `rpfunc.schedule`; None: slots dealt round robin
    compute_dtype that parameters are cast to where tasks run, torch.bfloat16 for example; None: their own
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
    job = Job(
        model, objective, chosen, microbatches, how, grain(recompute), frozen, order_of_tasks, blocks, compute_dtype
    )

    def function(params: Params, batch: Batch, total: Tensor | None = None) -> tuple[Result, dict[str, Any]]:
        model.check(params)
        total = _as_tensor(total)
        with open_runtime(workers) as runtime, Session(job, runtime) as session:
            chosen = choose_plan(job, params, prepare(job, batch, total)[0], runtime.num_workers)
            marked = params if frozen is None else freeze(model, params, frozen)[1]
            running = session.start(marked, batch, chosen, total=total)
            return running.wait(), running.iteration.grads()

    return function


def _as_tensor(total: Any) -> Tensor | None:
    if total is None or (isinstance(total, Tensor) and not total.is_complex() and total.dtype != torch.bool):
        return total
    total = plain_number(total)
    if is_real(total) and not isinstance(total, bool) and not MOST < abs(total) < inf:
        return torch.tensor(float(total), dtype=torch.float64)
    raise BatchError(
        f"batch: total is {shown(total)}, needs one number, as objective.total(objective.prepare(batch)) gives"
    )


@contextmanager
def open_runtime(workers: Workers) -> Iterator[Runtime]:
    """Yields the runtime that `workers` means; threads that it starts end with the block."""
    if isinstance(workers, Runtime):
        yield workers
        return
    with Runtime(_specs(workers)) as runtime:
        yield runtime


def _specs(workers: Any) -> Sequence[Any]:
    if is_count(workers):
        if not 1 <= workers <= MOST_WORKERS:
            bound = f"at most {MOST_WORKERS}" if workers > 0 else "at least 1 (or None for the caller's thread)"
            raise OptionsError(f"workers: found {shown(workers)}, it must be {bound}")
        return [Cpu()] * int(workers)
    if workers is None:
        return ()
    if not isinstance(workers, Sequence) or isinstance(workers, str) or not workers:
        raise OptionsError(
            f"workers: found {shown(workers)}, needs a number, specs such as [Cpu(threads=2)], a Runtime or None"
        )
    return workers
