"""What a gradient computation was asked for, checked before any work; its plan and schedule for each batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.checks import call_problems, count_problems, is_count, is_word, plain_number, shown
from rpfunc.errors import OptionsError, PlanError, ScheduleError, note
from rpfunc.model import Model, Params
from rpfunc.objectives.objective import Objective
from rpfunc.plan.flops import forward_flops
from rpfunc.plan.partition import partition
from rpfunc.plan.plan import Plan
from rpfunc.runtime.tasks import Recompute
from rpfunc.schedule.round_robin import round_robin
from rpfunc.schedule.task import Schedule
from rpfunc.schedule.validate import halved_as, validate
from rpfunc.schedule.workload import Workload
from rpfunc.stream.chunk_major import check_stepping
from rpfunc.stream.streaming import Streaming, dtype_problems

Scheduler = Callable[[Workload, int], Schedule]
"""(work, num_workers) -> the schedule: the form that the generators in `rpfunc.schedule` have."""


@dataclass(frozen=True)
class Job:
    """What `value_and_grad` was asked for. Raises OptionsError or PlanError listing what cannot work."""

    model: Model
    objective: Objective | None
    plan: Plan | None
    microbatches: int
    streaming: Streaming
    recompute: Recompute
    frozen: tree.Mask | None
    schedule: Schedule | Scheduler | None = None
    blocks: int = 1
    compute_dtype: torch.dtype | None = None
    forward_only: bool = False

    def __post_init__(self) -> None:
        for name in ("microbatches", "blocks"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        problems = self.streaming.problems()
        kinds: dict[str, tuple[object, type]] = {"model": (self.model, Model)}
        if not self.forward_only:
            kinds["objective"] = self.objective, Objective
        problems += [
            f"{name} is a {type(found).__name__}, needs {kind.__name__} (a function such as sft must be called)"
            for name, (found, kind) in kinds.items()
            if not isinstance(found, kind)
        ]
        uncounted = count_problems({"microbatches": self.microbatches})
        problems = uncounted + problems
        if uncounted:
            problems += count_problems({"blocks": self.blocks})
        elif not is_count(self.blocks) or not 1 <= self.blocks <= self.microbatches:
            problems.append(
                f"blocks is {shown(self.blocks)}, it must be 1 to microbatches, which is {self.microbatches}"
            )
        if not is_word(self.recompute, get_args(Recompute)):
            problems.append(
                f"recompute is {shown(self.recompute)}, it must be 'stage' (True), 'layer' or 'none' (False)"
            )
        elif is_word(self.streaming.order, ["chunk"]) and self.recompute == "none":
            problems.append("recompute=False keeps a layer's residuals, which order 'chunk' never has at once")
        problems += dtype_problems(self.compute_dtype)
        if self.plan is not None and not isinstance(self.plan, Plan):
            problems.append(f"plan is a {type(self.plan).__name__}, needs a Plan, its text, or None")
            raise OptionsError.listing("options", problems)
        problems += _function_problems("frozen", self.frozen, ("path", "leaf"), "bool")
        problems += _function_problems("schedule", self.schedule, ("work", "num_workers"), "Schedule")
        if not (self.schedule is None or isinstance(self.schedule, Schedule) or callable(self.schedule)):
            problems.append(
                f"schedule is a {type(self.schedule).__name__}, needs a Schedule, its text, or a function "
                "(work, num_workers) -> Schedule such as rpfunc.schedule.round_robin"
            )
        if self.plan is None and isinstance(self.schedule, Schedule):
            stages = sorted({f"{stage}{kind}" for stage, kind, _ in self.schedule.tasks} - {"0X"})
            if stages:
                problems.append(
                    f"schedule runs the stages {', '.join(stages)}, so it needs the plan that says which layers "
                    "they are, as in plan='F0:4 X4:6 B0:2 B2:4'"
                )
        if problems:
            raise OptionsError.listing("options", problems)
        if self.streaming.order == "chunk":
            check_stepping(self.model.layers)
        if self.plan is not None and self.forward_only:
            if self.plan.backward or self.plan.fused:
                raise PlanError(
                    f"plan '{self.plan}': has stages that take gradients, and none are asked for; needs forward stages "
                    f"alone, as in 'F0:{self.model.num_layers}'"
                )
            self.plan.check(self.model.num_layers, trained=False)
        elif self.plan is not None:
            if not self.plan.backward and self.plan.fused is None:
                backward = Plan((), None, self.plan.forward)
                raise PlanError(
                    f"plan '{self.plan}': has no backward stage, so it gives no gradient; needs some, "
                    f"as in '{self.plan} {backward}'"
                )
            self.plan.check(self.model.num_layers)


def _function_problems(name: str, given: Any, parameters: tuple[str, ...], returned: str) -> list[str]:
    problems = call_problems(name, given, parameters) if callable(given) else []
    return [f"{problem}; needs a function ({', '.join(parameters)}) -> {returned}" for problem in problems]


def grain(recompute: bool | Recompute) -> Recompute:
    """Returns the word for what True and False stand for; others as they are."""
    if isinstance(recompute, bool):
        return "stage" if recompute else "none"
    return recompute


def choose_plan(job: Job, params: Params, prepared: Batch, num_workers: int) -> Plan:
    """Returns the job's plan, or the one that suits so many workers."""
    if job.plan is not None:
        return job.plan
    if num_workers == 1 or isinstance(job.schedule, Schedule):
        return Plan.single(job.model.num_layers)
    num_microbatches = len(prepared.microbatches(job.microbatches))
    return partition(forward_flops(job.model, params, prepared), num_workers, num_microbatches)


def choose_schedule(
    job: Job, plan: Plan, num_microbatches: int, num_workers: int, cursor: int
) -> tuple[Schedule, Workload]:
    """Returns (the schedule, one line for each worker; the workload that it does).

    Raises ScheduleError for a schedule that does not fit the workers, the plan or the microbatches, or never ends.
    """
    work = Workload(plan.slots, num_microbatches, min(job.blocks, num_microbatches))
    if job.schedule is None:
        return round_robin(work, num_workers, cursor), work
    schedule = job.schedule if isinstance(job.schedule, Schedule) else _made(job.schedule, work, num_workers)
    if not isinstance(schedule, Schedule):
        raise OptionsError(f"schedule: the function returned a {type(schedule).__name__}, it must return a Schedule")
    lines, found = len(schedule.workers), len({task.microbatch for task in schedule.tasks})
    problems = []
    if lines > num_workers:
        there = f"there are {num_workers} workers" if num_workers > 1 else "there is 1 worker"
        problems.append(f"has {lines} lines, one a worker, and {there}; workers={lines} would do")
    if found != num_microbatches:
        problems.append(
            f"has {found} microbatches, the batch is cut into {num_microbatches}; a function (work, num_workers) -> "
            "Schedule, such as rpfunc.schedule.round_robin, makes one for each batch"
        )
    if problems:
        raise ScheduleError.listing("schedule", problems)
    work = halved_as(schedule, work)
    validate(schedule, work)
    return Schedule(schedule.workers + ((),) * (num_workers - lines)), work


def _made(scheduler: Scheduler, work: Workload, num_workers: int) -> Schedule:
    try:
        return scheduler(work, num_workers)
    except Exception as error:
        note(
            error,
            f"in the function given as schedule, for {work.num_microbatches} microbatches on {num_workers} "
            f"worker{'s' if num_workers > 1 else ''}",
        )
        raise
