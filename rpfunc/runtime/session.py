"""A caller's gradient computations on a runtime: one, or iterations that join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.errors import BatchError, OptionsError
from rpfunc.meter import Meter
from rpfunc.model import Params
from rpfunc.objectives.checked import checked
from rpfunc.objectives.objective import Objective
from rpfunc.plan.plan import Plan
from rpfunc.runtime.dispatch import Dispatch
from rpfunc.runtime.execution import Execution
from rpfunc.runtime.iteration import Iteration
from rpfunc.runtime.job import Job, choose_schedule
from rpfunc.runtime.operations import Line, Trail, Wait, gradient_waits, operations, version_of
from rpfunc.runtime.outline import Outline
from rpfunc.runtime.progress import Progress, Stopped
from rpfunc.runtime.room import Question, check_room, needs
from rpfunc.runtime.tasks import Work
from rpfunc.runtime.workers import Runtime
from rpfunc.schedule.timeline import Timeline
from rpfunc.stream.flat import dense
from rpfunc.stream.freeze import Frozen, thawing
from rpfunc.stream.transforms import running_transforms
from rpfunc.stream.value import AsTasksRead, with_statistic


@dataclass(frozen=True)
class Result:
    """What a gradient computation reports: the loss (), its denominator () (both float64), and when what ran.

    peak_bytes  by worker, the most that its memory has held since the runtime began; None where it has no limit
    """

    loss: Tensor
    total: Tensor
    timeline: Timeline
    peak_bytes: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Running:
    """A gradient computation in flight.

    waits  by subtree, what has to happen before its gradient may be read
    scale  by which the loss was multiplied, a power of two
    """

    iteration: Iteration
    dispatch: Dispatch
    total: Tensor
    waits: dict[str, list[Wait]]
    meters: Sequence[Meter | None]
    scale: float = 1.0

    def wait(self) -> Result:
        """Returns the result once all tasks have ended; raises what a task raised."""
        timeline = self.dispatch.wait()
        peaks = tuple(None if meter is None else meter.peak_bytes for meter in self.meters)
        return Result(self.iteration.loss() / self.scale, self.total, timeline, peaks)

    def cancel(self) -> None:
        """Drops what has not begun and returns once the workers are free."""
        self.dispatch.cancel()


class Session:
    """Iterations of one job on one runtime, numbered from 0; later ones may be started while earlier ones run."""

    def __init__(self, job: Job, runtime: Runtime) -> None:
        if job.recompute == "none" and not all(runtime.shares_memory):
            raise OptionsError(
                "options: recompute=False keeps residuals in the host's memory, and some workers have their own; "
                "recompute='layer' would do"
            )
        self.job, self.runtime, self.progress = job, runtime, Progress()
        self._model = job.model if job.frozen is None else thawing(job.model)
        self._objective = None if job.objective is None else checked(job.objective)
        self._next = 0
        self._trails: list[Trail] = []
        self._outline: Outline | None = None  # of the parameters

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Drops all that has not begun if the block ends by an error, an interrupt that no wait has seen included."""
        if error is not None:
            self.progress.fail(RuntimeError("cancelled"), 0)

    def start(
        self,
        params: Params,
        batch: Batch,
        plan: Plan,
        *,
        total: Tensor | None = None,
        version: int | None = None,
        scale: float = 1.0,
    ) -> Running:
        """Starts the next iteration; where slots are dealt like cards, the runtime's cursor moves on by them.

        params   frozen leaves are marked. They may be filled while it runs: then their `version` says whose events
                 tell that a subtree is there. The first iteration's are all there: they tell the shapes of the others'
        """
        job, runtime = self.job, self.runtime
        if job.objective is not None and running_transforms():
            raise OptionsError(
                f"gradients are asked for inside {', '.join(running_transforms())} of torch.func, as in a layer that "
                "is being differentiated, which rpfunc's gradients do not go through; torch.func.vjp would"
            )
        prepared, total = prepare(job, batch, total)
        # kernels sum in an order that depends on strides: what is copied to a device must have those that it has here
        pieces = [piece.map(_dense) for piece in prepared.microbatches(job.microbatches)]
        if version is None:
            params = tree.map(_dense, dict(params))
        schedule, workload = choose_schedule(job, plan, len(pieces), runtime.num_workers, runtime.cursor)
        if self._objective is not None and self._objective.statistic is not None:
            if version is not None:
                self._await_version(version)
            read = AsTasksRead(params, job.compute_dtype)
            pieces = with_statistic(self._model, self._objective, read, pieces, job.streaming)
        objective = _scaled(self._objective, scale)
        work = Work(self._model, objective, plan, job.streaming, job.recompute, workload, job.compute_dtype)
        number, shares_memory = self._next, runtime.shares_memory
        iteration = Iteration(work, params, pieces, total, runtime.recorder, number, version or 0)
        lines, trails = operations(number, schedule, work, shares_memory, version, self._trails)
        self._check_room(lines, iteration, pieces, is_scaled=scale != 1.0)
        self._trails = trails
        waits = gradient_waits(number, lines, work)
        if job.schedule is None:
            runtime.cursor = (runtime.cursor + len(plan.slots)) % runtime.num_workers
        self._next += 1
        check = partial(self.progress.check, number)
        perform = Execution(iteration, runtime.devices, runtime.recorder, runtime.meters, check)
        dispatch = Dispatch(runtime, self.progress, number, lines, plan, perform)
        return Running(iteration, dispatch, total, waits, runtime.meters, scale)

    def _check_room(
        self, lines: Sequence[Line], iteration: Iteration, pieces: Sequence[Batch], *, is_scaled: bool
    ) -> None:
        runtime, work = self.runtime, iteration.work
        limits = [None if meter is None else meter.limit_bytes for meter in runtime.meters]
        if all(limit is None for limit in limits):
            return
        if self._outline is None:
            self._outline = Outline.of(dict(iteration.params))
        sizes = runtime.sizes(Question.of(self.job, work, is_scaled, self._outline, pieces, iteration.total))
        check_room(needs(lines, work, sizes, runtime.shares_memory), limits)

    def _await_version(self, version: int) -> None:
        names = {name for layer in self._model.layers for name in layer.subtrees}
        try:
            self.progress.wait([version_of(version, name) for name in names], self._next)
        except Stopped:
            failure = self.progress.failure(self._next)
            assert failure is not None
            raise failure from None


def _dense(leaf: Any) -> Any:
    if isinstance(leaf, Frozen):
        return Frozen(dense(leaf.tensor))
    return dense(leaf) if isinstance(leaf, Tensor) else leaf


def _scaled(objective: Objective | None, scale: float) -> Objective | None:
    if objective is None or scale == 1.0:
        return objective
    return replace(objective, loss=lambda sums, batch, total: objective.loss(sums, batch, total) * scale)


def prepare(job: Job, batch: Any, total: Any = None) -> tuple[Batch, Tensor]:
    """Returns (the batch with what the objective adds, its total). Raises BatchError if that cannot be."""
    if not isinstance(batch, Batch):
        raise BatchError(f"batch: is a {type(batch).__name__}, needs a Batch, as in Batch(row={{'tokens': tokens}})")
    if job.objective is None:
        return batch, torch.zeros((), dtype=torch.float64)
    objective = checked(job.objective)
    prepared = objective.prepare(batch)
    total = objective.total(prepared) if total is None else torch.as_tensor(total, dtype=torch.float64)
    if total.dim():
        raise BatchError(f"batch: total has shape {tuple(total.shape)}, it must be one number")
    if not bool(torch.isfinite(total)):
        raise BatchError(f"batch: the {job.objective.name} objective's total is {total.item()}, it must be finite")
    return prepared, total
