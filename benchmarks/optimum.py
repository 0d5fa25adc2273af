"""How much longer each schedule takes than the shortest there is, which a constraint solver (CP-SAT) proves.

Forward passes take 1, backward passes with recomputation 3 (input gradients 2, weight gradients 1), fused ones 3;
transfers and updates take no time. The shortest schedule of the same tasks: with any task on any worker, and with every
stage on the worker that the generator gives it. Needs the `test` extra (ortools).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from ortools.sat.python import cp_model

from rpfunc.plan import Plan
from rpfunc.plan.costs import StageCost
from rpfunc.schedule import (
    Schedule,
    Task,
    Workload,
    gpipe,
    greedy,
    halve,
    interleaved,
    looped_bfs,
    one_f_one_b,
    round_robin,
    simulate,
    split_dispatch,
    zb_h1,
    zb_v,
)

TIMES = {"F": 1, "X": 3, "B": 3, "I": 2, "W": 1}
ASYMMETRIC = "F0:3 X3:4 B0:1 B1:2 B2:3"

Generator = Callable[[Workload, int], Schedule]


def cost_of(work: Workload) -> dict[tuple[str, int], StageCost]:
    return {(task.kind, task.stage): StageCost(TIMES[task.kind]) for task in work.tasks}


CASES: list[tuple[str, Generator, int | str]] = [
    ("gpipe", gpipe, 1),
    ("one_f_one_b", one_f_one_b, 1),
    ("interleaved", interleaved, 2),
    ("looped_bfs", looped_bfs, 2),
    ("zb_h1", zb_h1, 1),
    ("zb_v", zb_v, 2),
    ("round_robin", round_robin, ASYMMETRIC),
    ("split_dispatch", lambda work, workers: split_dispatch(work, workers, {("X", 1): 2}), ASYMMETRIC),
    ("greedy", lambda work, workers: greedy(work, workers, cost_of(work)), ASYMMETRIC),
]
"""Name, generator, and stages a worker or a plan."""


def shortest(work: Workload, num_workers: int, bound: Mapping[Task, int] | None, seconds: float) -> tuple[float, bool]:
    """Returns the least makespan that was found, and whether none is shorter."""
    model = cp_model.CpModel()
    tasks = work.tasks
    horizon = sum(TIMES[task.kind] for task in tasks)
    starts = {task: model.new_int_var(0, horizon, str(task)) for task in tasks}
    lanes: list[list[Any]] = [[] for _ in range(num_workers)]
    for task, start in starts.items():
        time = TIMES[task.kind]
        if bound is not None:
            lanes[bound[task]].append(model.new_fixed_size_interval_var(start, time, ""))
        else:
            here = [model.new_bool_var("") for _ in lanes]
            model.add_exactly_one(here)
            for lane, chosen in zip(lanes, here, strict=True):
                lane.append(model.new_optional_fixed_size_interval_var(start, time, chosen, ""))
        for other in work.dependencies(task):
            model.add(start >= starts[other] + TIMES[other.kind])
    for lane in lanes:
        model.add_no_overlap(lane)
    makespan = model.new_int_var(0, horizon, "makespan")
    model.add_max_equality(makespan, [start + TIMES[task.kind] for task, start in starts.items()])
    model.add(num_workers * makespan >= horizon)  # true anyway, and found by no propagation
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    # where time runs out, what is proved is a bound
    return (solver.objective_value, True) if status == cp_model.OPTIMAL else (solver.best_objective_bound, False)


def measure(
    name: str, generator: Generator, stages: int | str, num_workers: int, microbatches: int, seconds: float
) -> dict[str, Any]:
    plan = (
        Plan.parse(stages)
        if isinstance(stages, str)
        else Plan.symmetric(stages * num_workers, range(stages * num_workers))
    )
    work = Workload(plan.slots, microbatches, num_blocks=2 if name == "split_dispatch" else 1)
    schedule = generator(work, num_workers)
    work = halve(work) if name in ("zb_h1", "zb_v") else work
    time = simulate(schedule, cost_of(work), work=work).makespan_s
    row = {"schedule": name, "workers": num_workers, "microbatches": microbatches, "time": time}
    row["anywhere"], row["anywhere_proved"] = shortest(work, num_workers, None, seconds)
    if not isinstance(stages, str):
        bound = {task: worker for worker, own in enumerate(schedule.workers) for task in own}
        row["bound"], row["bound_proved"] = shortest(work, num_workers, bound, seconds)
    return row


def shown(row: Mapping[str, Any], which: str) -> str:
    if which not in row:
        return "-"
    return f"{'' if row[f'{which}_proved'] else 'at most '}{row['time'] / row[which] - 1:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the solver for one optimum")
    options = parser.parse_args()
    rows = []
    for num_workers, microbatches in ((2, 4), (3, 4)):
        for name, generator, stages in CASES:
            row = measure(name, generator, stages, num_workers, microbatches, options.seconds)
            rows.append(row)
            gaps = f"{shown(row, 'anywhere')} above any, {shown(row, 'bound')} above any with its placement"
            print(f"{name}, {num_workers} workers, {microbatches} microbatches: {row['time']}; {gaps}", flush=True)
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
