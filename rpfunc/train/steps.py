"""Training steps that join: later iterations are on their way while the caller looks at a result."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.checks import flag_problems, is_word, shown
from rpfunc.errors import GradientError, OptionsError
from rpfunc.model import Model
from rpfunc.objectives.objective import Objective
from rpfunc.optim import Transformation
from rpfunc.plan.plan import Plan
from rpfunc.runtime.context import CallersContext
from rpfunc.runtime.job import Job, Scheduler, choose_plan, grain
from rpfunc.runtime.progress import Stopped
from rpfunc.runtime.session import Running, Session, prepare
from rpfunc.runtime.state import LossScale, State, Values
from rpfunc.runtime.store import Store
from rpfunc.runtime.tasks import Recompute
from rpfunc.runtime.update import Measured, make_step, measure_gradients, skip_step
from rpfunc.runtime.value_and_grad import Workers, open_runtime
from rpfunc.runtime.waiting import done, fulfil, result_of
from rpfunc.runtime.workers import UPDATE, Cpu, Runtime
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.timeline import HOST, Event, Timeline
from rpfunc.stream.streaming import Order, Streaming
from rpfunc.train.auto_plan import AutoPlan, advance

T = TypeVar("T")

END: Any = object()
"""What comes after the last batch."""

CLEAN_STEPS = 2000
"""Steps without an overflow after which a loss scale is doubled."""


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    step        its number, from 1
    loss        (), float64, before the update
    total       (), float64, the loss's denominator; 0 where no label was valid
    grad_norm   the gradients' Euclidean norm, before any clipping
    skipped     no update was made, since the total was 0 or the gradient not finite
    timeline    when what ran; on the host, the update of the step before, which went on before or meanwhile
    loss_scale  by which the loss was multiplied while gradients were taken
    peak_bytes  by worker, the most that its memory has held so far; None where it has no limit
    """

    step: int
    loss: Tensor
    total: Tensor
    grad_norm: float
    skipped: bool
    timeline: Timeline
    loss_scale: float = 1.0
    peak_bytes: tuple[int | None, ...] = ()


def train_steps(
    state: State,
    batches: Iterable[Batch],
    *,
    model: Model,
    objective: Objective,
    optimizer: Transformation,
    asynchronous: bool = False,
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
    donate: bool = False,
    nonfinite: Literal["skip", "raise"] = "skip",
) -> Generator[tuple[State, StepResult], None, None]:
    """Yields (state, result) after each batch, while worker threads already run the next ones.

    With g the gradient, c the cast to `compute_dtype` and u the optimizer's update,

        p[k+1] = p[k] + u(g(c(p[k]));   s[k], p[k])    synchronous
        p[k+1] = p[k] + u(g(c(p[k-1])); s[k], p[k])    asynchronous, p[-1] = p[0]

    Asynchronously step k is made in a thread of its own while iteration k+1 computes its gradient; subtree by subtree,
    iteration k+2 goes on where a new version is complete. A yielded state is waited for only if it is looked at.
    While the caller is busy with a result, one iteration goes on on the workers; asynchronously up to two, and the
    update that makes the yielded state. No more: the update after them begins when the next result is asked for, since
    the state that it may overwrite may be looked at until then.

    A step whose total is 0 changes nothing but the step count; one whose gradient is not finite neither, or raises
    GradientError with nonfinite="raise". With `donate` a step overwrites the state it was given: a yielded state is
    good until the next one is asked for. With plan="auto" the first steps measure each layer, and the plan follows from
    that; it is measured anew where times drift (see `rpfunc.train.auto_plan`), and no result changes by a bit.

    compute_dtype  that layers get their parameters in; gradients are summed, and parameters updated, in float32 or
                   wider if the state's parameters are. With torch.float16 the loss is scaled: the scale halves when a
                   gradient overflows, whose step is skipped, and doubles after 2,000 steps in which none has

    The other arguments are those of `value_and_grad`. Asynchronous steps need a thread to run beside: workers=None
    stands for one worker with the caller's intra-op threads.
    One batch more (two, if asynchronous) than states have been yielded is asked for: batches that depend on the newest
    state (rollouts) want one call a rollout, with a shared `Runtime`.
    An error ends the steps; the state yielded last (or given, before the first) is whole unless it was donated to an
    update that failed, or to one that an interrupt came beside, which its next use says. A state whose own update fails
    raises that error when it is looked at; the one before it is whole or says that it is broken. StopIteration, which
    would look like the end of the steps, becomes an OptionsError that names where it was raised.
    """
    problems = flag_problems({"asynchronous": asynchronous, "donate": donate})
    if not is_word(nonfinite, ["skip", "raise"]):
        problems.append(f"nonfinite is {shown(nonfinite)}, it must be 'skip' or 'raise'")
    if not isinstance(state, State):
        problems.append(f"state is a {type(state).__name__}, needs a State (State.create(params, optimizer))")
    if not isinstance(optimizer, Transformation):
        problems.append(f"optimizer is a {type(optimizer).__name__}, needs one of rpfunc.optim")
    problems += _batches_problems(batches)
    if problems:
        raise OptionsError.listing("options", problems)
    automatic = is_word(plan, ["auto"])
    chosen = None if automatic else Plan.parse(plan) if isinstance(plan, str) else plan
    order_of_tasks = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    how = Streaming(chunk, head_chunk, order, keep_attention)
    job = Job(
        model, objective, chosen, microbatches, how, grain(recompute), frozen, order_of_tasks, blocks, compute_dtype
    )
    if asynchronous and workers is None:
        workers = [Cpu(torch.get_num_threads())]
    steps = _Steps(job, optimizer, int(asynchronous), donate, nonfinite)
    with _stops_told():
        each = iter(batches)
    return steps.run(state, each, workers, automatic)


def _batches_problems(batches: Any) -> list[str]:
    """Returns, in words, why no batch after batch can be asked for."""
    if isinstance(batches, Batch):
        return ["batches is one Batch, needs an iterable of them, as in [batch]"]
    is_iterable = isinstance(batches, Iterable) or hasattr(type(batches), "__getitem__")
    if is_iterable and not isinstance(batches, Mapping | str | bytes):
        return []
    called = "; a generator function must be called" if callable(batches) else ""
    return [f"batches is a {type(batches).__name__}, needs an iterable of Batch, as in [batch]{called}"]


@dataclass(frozen=True)
class _Steps:
    job: Job
    optimizer: Transformation
    staleness: int
    donate: bool
    nonfinite: str

    def run(
        self, state: State, batches: Iterator[Batch], workers: Workers, automatic: bool
    ) -> Generator[tuple[State, StepResult], None, None]:
        with _stops_told(), open_runtime(workers) as runtime:
            flight = _Flight(self, state, batches, runtime, automatic)
            with flight.session:
                try:
                    for _ in range(1 + self.staleness):
                        flight.start(flight.next_batch())
                    while flight.running:
                        state, result = flight.step(state)
                        yield state, result
                    flight.finish()
                finally:
                    flight.cancel()


class _Flight:
    """The iterations and the step that are under way."""

    def __init__(
        self, steps: _Steps, state: State, batches: Iterator[Batch], runtime: Runtime, automatic: bool
    ) -> None:
        job, values = steps.job, state.values()
        job.model.check(values.params)
        self._steps, self._job, self._batches, self._runtime = steps, job, batches, runtime
        with torch.no_grad():  # what is made of parameters that require gradients keeps no way back to them
            self._store = Store(
                job.model,
                values,
                steps.optimizer,
                frozen=job.frozen,
                staleness=steps.staleness,
                compute_dtype=job.compute_dtype,
                donate=steps.donate,
            )
        self.session = Session(job, runtime)
        self._context = CallersContext.here()
        self._planner = AutoPlan.begin(job.model.num_layers, runtime.num_workers) if automatic else None
        self._plan = job.plan
        self._scales = _scales(values.scales, 1 + steps.staleness) if job.compute_dtype == torch.float16 else []
        self.running: deque[Running] = deque()
        self._number = 0  # of the iteration whose step comes next
        self._ended = False
        self._failure: Exception | None = None
        self._step: Future[Values] | None = None
        self._updates: deque[Event] = deque()  # written by the thread that makes steps, before it measures the next

    def next_batch(self) -> Any:
        """Returns one batch more, END after the last. What fails here is told once all steps before it are done."""
        batch = END
        if not self._ended:
            try:
                batch = next(self._batches, END)
            except Exception as error:
                self._failure = error
        self._ended = batch is END
        return batch

    def start(self, batch: Any) -> None:
        """Starts an iteration on a batch. What fails here is told once all steps before it are done."""
        if batch is END:
            return
        try:
            if self._planner is not None:
                self._plan = self._planner.plan
            elif self._plan is None:  # chosen once, for batches like the first
                prepared, _ = prepare(self._job, batch)
                params = self._store.values.params
                self._plan = choose_plan(self._job, params, prepared, self._runtime.num_workers)
            version = self._store.read_by(self._number + len(self.running))
            scale = self._scales[len(self.running)].factor if self._scales else 1.0
            params = self._store.versions[version]
            made = version if version > 0 else None  # of those made here there are events; the first ones are there
            self.running.append(self.session.start(params, batch, self._plan, version=made, scale=scale))
        except Exception as error:
            self._ended, self._failure = True, error

    def step(self, state: State) -> tuple[State, StepResult]:
        """Takes the oldest iteration's result, starts the step that follows from it, and one iteration more."""
        running, number = self.running[0], self._number
        measured: Measured | None = None
        with suppress(Stopped):  # of which `wait` tells the reason
            measured = result_of(self._submit(partial(self._measure, running, number)))
        result = running.wait()
        assert measured is not None
        self.running.popleft()
        # an iteration that was under way when the plan changed says nothing of the new one
        if self._planner is not None and running.iteration.work.plan == self._planner.plan:
            self._planner = advance(self._planner, result.timeline)
        updates, timeline = tuple(self._updates), result.timeline
        self._updates.clear()
        last = max(timeline.events, key=lambda event: event.end_s).task
        finite = math.isfinite(measured.norm) and math.isfinite(result.loss.item())
        if not finite and self._steps.nonfinite == "raise" and running.scale == 1.0:
            raise GradientError(
                f"step {state.step + 1}: loss {result.loss.item()}, gradient norm {measured.norm}; "
                'nonfinite="skip" passes over such steps'
            )
        skipped = not finite or result.total.item() == 0
        if self._scales:
            self._scales = [*self._scales[1:], _next_scale(self._scales[-1], overflowed=not finite)]
        self._number += 1
        batch = self.next_batch()  # an interrupt while it is made finds the state as it was
        if self._steps.donate and not skipped:
            state.consume()  # here, so that its next use raises at once, however late the step begins
        make = partial(self._make, state, measured, number, skipped, last)
        if skipped:
            self._store.skip_version(number)
        else:
            self._store.open(number + 1)
        objective = self._job.objective
        whole = objective is not None and objective.statistic is not None  # its pass over a batch reads all subtrees
        if self._steps.staleness or self._runtime.is_inline or whole:
            self._step = self._submit(make)
            self.start(batch)
        else:  # the workers are free: this thread, with all its cores, makes the step while they wait for its subtrees
            try:
                self.start(batch)
            except BaseException:  # an interrupt: nothing has overwritten the state
                state.take_back()
                raise
            with self._runtime.waiting_for_caller():
                self._step = self._submit(make)
        reported = StepResult(
            state.step + 1,
            result.loss,
            result.total,
            measured.norm,
            skipped,
            replace(timeline, events=updates + timeline.events),
            running.scale,
            result.peak_bytes,
        )
        return State.pending(self._step, state.step + 1), reported

    def finish(self) -> None:
        """Waits for the last step, and raises what ended the iterations if it was no end of batches."""
        if self._step is not None:
            result_of(self._step)
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> None:
        """Drops what has not begun, and waits for what has: a step under way is completed."""
        for running in reversed(self.running):
            running.cancel()
        if self._step is not None:
            done(self._step)

    def _measure(self, running: Running, number: int) -> Measured:
        return measure_gradients(
            self._steps.optimizer, self._store, running, self.session.progress, self._runtime.recorder, number
        )

    def _make(self, state: State, measured: Measured, number: int, skipped: bool, last: Task) -> Values:
        progress, began = self.session.progress, time.perf_counter()
        progress.forget(number)
        if skipped:
            values = skip_step(self._store, progress, self._runtime.recorder, number)
        else:
            try:
                with _stops_told():
                    values = make_step(self._store, measured, progress, self._runtime.recorder, number)
            except BaseException:
                if self._steps.donate:
                    state.break_with(f"the update of step {state.step + 1}")
                raise
        self._updates.append(Event(HOST, "update", last, began, time.perf_counter()))
        return values._replace(scales=tuple(self._scales))

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function in the optimizer's thread if steps are asynchronous, else here and now."""
        future: Future[T] = Future()

        def in_context() -> T:
            with self._context.entered():
                return function()

        if self._steps.staleness:
            self._runtime.submit({UPDATE: partial(fulfil, future, in_context)})
        else:
            future.set_result(in_context())
        return future


@contextmanager
def _stops_told() -> Iterator[None]:
    """Raises an error of words in place of StopIteration, which no generator hands on."""
    try:
        yield
    except (StopIteration, RuntimeError) as error:
        stop = error if isinstance(error, StopIteration) else error.__cause__  # a generator has had it already
        if not isinstance(stop, StopIteration):
            raise
        notes = [note.removeprefix("rpfunc: ") for note in getattr(error, "__notes__", ())]
        raise OptionsError(
            f"train_steps: {stop!r} was raised {', '.join(notes) or 'where batches are made or prepared'}; it would "
            "look like the end of the steps, so another error is needed there"
        ) from error


def _scales(known: Sequence[LossScale], count: int) -> list[LossScale]:
    """Returns as many as iterations run at once; the last one goes on where a run before this one had fewer."""
    scales = list(known)[:count] or [LossScale()]
    return scales + scales[-1:] * (count - len(scales))


def _next_scale(scale: LossScale, overflowed: bool) -> LossScale:
    if overflowed:
        return LossScale(max(scale.factor / 2, 1.0))
    if scale.clean + 1 < CLEAN_STEPS:
        return LossScale(scale.factor, scale.clean + 1)
    return LossScale(scale.factor * 2)
