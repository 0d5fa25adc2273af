"""A model's outputs, by any plan on any workers: inference and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.errors import ModelError
from rpfunc.model import Model, Params
from rpfunc.plan.plan import Plan, Span
from rpfunc.runtime.job import Job, Scheduler
from rpfunc.runtime.session import Session
from rpfunc.runtime.value_and_grad import Workers, open_runtime
from rpfunc.schedule.task import Schedule, Task
from rpfunc.schedule.timeline import Timeline
from rpfunc.schedule.workload import Workload
from rpfunc.stream.streaming import Order, Streaming


def apply(
    model: Model,
    *,
    plan: Plan | str | None = None,
    workers: Workers = None,
    microbatches: int = 1,
    chunk: int | None = None,
    order: Order = "layer",
    schedule: Schedule | Scheduler | str | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Callable[[Params, Batch], tuple[Any, Timeline]]:
    """Returns fn(params, batch) -> (the last layer's output for all examples, the timeline). No gradient is taken.

    plan      forward stages, as in "F0:4 F4:8"; None: all layers in one, and microbatches are dealt to the workers
    The other arguments are those of `value_and_grad`. Outputs of microbatches are joined along dimension 0; what a
    layer returns without it (a 0-d tensor) raises ModelError. Whole outputs take memory: for a loss without gradients
    use `rpfunc.value`, for log-probabilities `rpfunc.logprobs`, which hold one chunk of logits.

    >>> from rpfunc import Batch, Layer, Model
    >>> from rpfunc.stream import rowwise
    >>> double = Model((Layer("double", rowwise(lambda params, x, batch: 2 * batch.row["x"])),))
    >>> apply(double)({}, Batch(row={"x": torch.ones(1, 3)}))[0]
    tensor([[2., 2., 2.]])
    """
    chosen = Plan.parse(plan) if isinstance(plan, str) else plan
    given = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    if chosen is None and isinstance(model, Model):  # what is none is told with all else that cannot work
        chosen, given = Plan((Span(0, model.num_layers),), None, ()), _deal if given is None else given
    job = Job(
        model,
        None,
        chosen,
        microbatches,
        Streaming(chunk, order=order),
        "stage",
        None,
        given,
        1,
        compute_dtype,
        forward_only=True,
    )

    def function(params: Params, batch: Batch) -> tuple[Any, Timeline]:
        model.check(params)
        with open_runtime(workers) as runtime, Session(job, runtime) as session:
            assert chosen is not None
            running = session.start(params, batch, chosen)
            timeline = running.dispatch.wait()
            return _joined(running.iteration.outputs()), timeline

    return function


def _deal(work: Workload, num_workers: int) -> Schedule:
    """Returns the schedule that deals the only stage's microbatches to the workers in turn."""
    tasks = [Task(0, "F", m) for m in work.all_microbatches]
    return Schedule(tuple(tuple(tasks[worker::num_workers]) for worker in range(num_workers)))


def _joined(outputs: list[Any]) -> Any:
    if len(outputs) == 1:
        return outputs[0]
    flat = [path for path, leaf in zip(tree.paths(outputs[0]), tree.leaves(outputs[0]), strict=True) if not leaf.dim()]
    if flat:
        raise ModelError(
            f"model: output {flat[0] or 'tensor'} has no dimension of examples, so those of {len(outputs)} "
            "microbatches cannot be joined; microbatches=1 would do"
        )
    return tree.map(lambda *leaves: torch.cat(leaves), *outputs)
