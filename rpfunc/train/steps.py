"""Training steps that join: the next iteration is on its way while the caller looks at the last one's result."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.errors import GradientError, OptionsError
from rpfunc.model import Model
from rpfunc.objectives.objective import Objective
from rpfunc.optim import Transformation, global_norm, step, step_donated
from rpfunc.plan.plan import Plan
from rpfunc.runtime.job import Job, choose_plan
from rpfunc.runtime.state import State
from rpfunc.runtime.value_and_grad import Running, Workers, open_runtime, start
from rpfunc.schedule.timeline import Timeline
from rpfunc.stream.streaming import Order, Streaming
from rpfunc.train.auto_plan import AutoPlan, advance

END: Any = object()
"""What comes after the last batch."""


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    step       its number, from 1
    loss       (), float64, before the update
    total      (), float64, the loss's denominator; 0 where no label was valid
    grad_norm  the gradients' Euclidean norm, before any clipping
    skipped    no update was made, since the total was 0 or the gradient not finite
    timeline   when what ran
    """

    step: int
    loss: Tensor
    total: Tensor
    grad_norm: float
    skipped: bool
    timeline: Timeline


def train_steps(
    state: State,
    batches: Iterable[Batch],
    *,
    model: Model,
    objective: Objective,
    optimizer: Transformation,
    plan: Plan | str | None = None,
    workers: Workers = None,
    microbatches: int = 1,
    chunk: int | None = None,
    head_chunk: int | None = None,
    order: Order = "layer",
    keep_attention: int = 0,
    recompute: bool = True,
    frozen: tree.Mask | None = None,
    donate: bool = False,
    nonfinite: Literal["skip", "raise"] = "skip",
) -> Generator[tuple[State, StepResult], None, None]:
    """Yields (state, result) after each batch, while worker threads already run the next one.

    p[k+1] = p[k] + u(gradient at p[k]): the optimizer is synchronous. A step whose total is 0 changes nothing but the
    step count; one whose gradient is not finite neither, or raises GradientError with nonfinite="raise". With `donate`
    the update overwrites the state it was given: a yielded state is good until the next one is asked for. With
    plan="auto" the first steps measure each layer, and the plan follows from that; it is measured anew where times
    drift (see `rpfunc.train.auto_plan`), and no result changes by a bit. The other arguments are those of
    `value_and_grad`.
    The next batch is asked for before a state is yielded: batches that depend on the newest state (rollouts) want one
    call a rollout, with a shared `Runtime`.
    An error ends the steps; the state yielded last (or given, before the first) is whole unless it was donated to an
    update that failed, which its next use says.
    """
    problems = [] if nonfinite in ("skip", "raise") else [f"nonfinite is {nonfinite!r}, it must be 'skip' or 'raise'"]
    if not isinstance(state, State):
        problems.append(f"state is a {type(state).__name__}, needs a State (State.create(params, optimizer))")
    if not isinstance(optimizer, Transformation):
        problems.append(f"optimizer is a {type(optimizer).__name__}, needs one of rpfunc.optim")
    if problems:
        raise OptionsError.listing("options", problems)
    automatic = plan == "auto"
    chosen = None if automatic else Plan.parse(plan) if isinstance(plan, str) else plan
    how = Streaming(chunk, head_chunk, order, keep_attention)
    job = Job(model, objective, chosen, microbatches, how, recompute, frozen)
    return _steps(state, iter(batches), job, optimizer, workers, donate, nonfinite, automatic)


def _steps(
    state: State,
    batches: Iterator[Batch],
    job: Job,
    optimizer: Transformation,
    workers: Workers,
    donate: bool,
    nonfinite: str,
    automatic: bool,
) -> Generator[tuple[State, StepResult], None, None]:
    with open_runtime(workers) as runtime:
        planner = AutoPlan.begin(job.model.num_layers, runtime.num_workers) if automatic else None

        def begin(state: State) -> Running | None:
            nonlocal job
            batch = next(batches, END)
            if batch is END:
                return None
            if planner is not None:
                job = replace(job, plan=planner.plan)
            elif job.plan is None:  # chosen once, for batches like the first
                prepared = job.objective.prepare(batch)
                job = replace(job, plan=choose_plan(job, state.params, prepared, runtime.num_workers))
            return start(job, state.params, batch, runtime)

        running = begin(state)
        try:
            while running is not None:
                result, grads = running.wait()
                if planner is not None:
                    planner = advance(planner, result.timeline)
                norm = global_norm(grads)
                finite = math.isfinite(norm) and math.isfinite(result.loss.item())
                if not finite and nonfinite == "raise":
                    raise GradientError(
                        f"step {state.step + 1}: loss {result.loss.item()}, gradient norm {norm}; "
                        'nonfinite="skip" passes over such steps'
                    )
                skipped = not finite or result.total.item() == 0
                state = _advance(state, None if skipped else grads, job.frozen, optimizer, donate)
                # A later batch that fails must not take this step's result with it.
                running, failure = None, None
                try:
                    running = begin(state)
                except Exception as error:
                    failure = error
                yield state, StepResult(state.step, result.loss, result.total, norm, skipped, result.timeline)
                if failure is not None:
                    raise failure
        finally:
            if running is not None:
                running.cancel()


def _advance(
    state: State, grads: dict[str, Any] | None, frozen: tree.Mask | None, optimizer: Transformation, donate: bool
) -> State:
    """Returns the state one step on; without gradients only the count moves."""
    params, optimizer_state = state.consume() if donate else (state.params, state.optimizer_state)
    if grads is None:
        return State(params, optimizer_state, state.step + 1)
    fixed, trained = tree.partition(dict(params), False if frozen is None else frozen)
    advance = step_donated if donate else step
    try:
        trained, optimizer_state = advance(optimizer, grads, optimizer_state, trained)
    except BaseException:
        if donate:
            state.break_with(f"the update of step {state.step + 1}")
        raise
    return State(tree.combine(fixed, trained), optimizer_state, state.step + 1)
