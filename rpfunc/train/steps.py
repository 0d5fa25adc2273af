"""Training steps that join: the next iteration is on its way while the caller looks at the last one's result."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.errors import GradientError
from rpfunc.model import Model
from rpfunc.objectives.objective import Objective
from rpfunc.optim import Transformation, global_norm, step, step_donated
from rpfunc.plan.plan import Plan
from rpfunc.runtime.state import State
from rpfunc.runtime.iteration import Work
from rpfunc.runtime.value_and_grad import Running, Workers, check_options, choose_plan, open_runtime, start
from rpfunc.schedule.timeline import Timeline


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
    plan: Plan | None = None,
    workers: Workers = None,
    microbatches: int = 1,
    chunk: int | None = None,
    recompute: bool = True,
    donate: bool = False,
    nonfinite: Literal["skip", "raise"] = "skip",
) -> Generator[tuple[State, StepResult], None, None]:
    """Yields (state, result) after each batch, while worker threads already run the next one.

    p[k+1] = p[k] + u(gradient at p[k]): the optimizer is synchronous. A step whose total is 0 changes nothing but the
    step count; one whose gradient is not finite neither, or raises GradientError with nonfinite="raise". With `donate`
    the update overwrites the state it was given: a yielded state is good until the next one is asked for. The other
    arguments are those of `value_and_grad`.
    An error ends the steps; the state yielded last (or given, before the first) is whole unless it was donated to an
    update that failed, which its next use says.
    """
    check_options(microbatches, chunk)
    iterator = iter(batches)
    with open_runtime(workers) as runtime:

        def begin(state: State) -> Running | None:
            nonlocal plan
            batch = next(iterator, None)
            if batch is None:
                return None
            plan = choose_plan(plan, model, state.params, batch, runtime)
            work = Work(model, objective, plan, chunk, recompute)
            return start(work, state.params, batch, microbatches, runtime)

        running = begin(state)
        try:
            while running is not None:
                result, grads = running.wait()
                norm = global_norm(grads)
                finite = math.isfinite(norm) and math.isfinite(result.loss.item())
                if not finite and nonfinite == "raise":
                    raise GradientError(
                        f"step {state.step + 1}: loss {result.loss.item()}, gradient norm {norm}; "
                        'nonfinite="skip" passes over such steps'
                    )
                skipped = not finite or result.total.item() == 0
                state = _advance(state, None if skipped else grads, optimizer, donate)
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


def _advance(state: State, grads: dict[str, Any] | None, optimizer: Transformation, donate: bool) -> State:
    """Returns the state one step on; without gradients only the count moves."""
    if grads is None:
        params, optimizer_state = state.consume() if donate else (state.params, state.optimizer_state)
        return State(params, optimizer_state, state.step + 1)
    if not donate:
        return State(*step(optimizer, grads, state.optimizer_state, state.params), state.step + 1)
    params, optimizer_state = state.consume()
    try:
        return State(*step_donated(optimizer, grads, optimizer_state, params), state.step + 1)
    except BaseException:
        state.break_with(f"the update of step {state.step + 1}")
        raise
