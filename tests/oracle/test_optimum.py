"""No schedule is shorter than the shortest there is, which a constraint solver proves for small instances."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from rpfunc import Plan
from rpfunc.plan import uniform_costs
from rpfunc.schedule import (
    Workload,
    gpipe,
    greedy,
    interleaved,
    looped_bfs,
    one_f_one_b,
    round_robin,
    simulate,
)
from rpfunc.testing import strategies

FORWARD, BACKWARD = 1, 3


def shortest(plan, num_microbatches, num_workers):
    """The least makespan of any assignment of tasks to workers and any order, F 1 and X and B 3, by its own rules."""
    model = cp_model.CpModel()
    forward = [("F", stage) for stage in range(len(plan.forward))]
    turn = [("X", len(plan.forward))] if plan.fused else []
    path = forward + turn + [("B", stage) for stage in range(len(plan.backward) - 1, -1, -1)]
    times = [FORWARD if kind == "F" else BACKWARD for kind, _ in path]
    horizon = sum(times) * num_microbatches
    ends, lanes = {}, [[] for _ in range(num_workers)]
    for m in range(num_microbatches):
        for place, time in enumerate(times):
            start = model.new_int_var(0, horizon, "")
            ends[place, m] = start + time
            chosen = [model.new_bool_var("") for _ in lanes]
            model.add_exactly_one(chosen)
            for lane, here in zip(lanes, chosen, strict=True):
                lane.append(model.new_optional_interval_var(start, time, start + time, here, ""))
            if place > 0:
                model.add(start >= ends[place - 1, m])
            if m > 0 and path[place][0] != "F":  # gradients are summed in microbatch order
                model.add(start >= ends[place, m - 1])
    for lane in lanes:
        model.add_no_overlap(lane)
    makespan = model.new_int_var(0, horizon, "")
    model.add_max_equality(makespan, list(ends.values()))
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 20
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


CASES = [
    # generator, plan, microbatches, workers, how much longer than the shortest it is
    (gpipe, "F0:1 F1:2 B0:1 B1:2", 3, 2, 2),
    (one_f_one_b, "F0:1 F1:2 B0:1 B1:2", 3, 2, 2),
    (interleaved, "F0:1 F1:2 F2:3 F3:4 B0:1 B1:2 B2:3 B3:4", 2, 2, 1),
    (looped_bfs, "F0:1 F1:2 F2:3 F3:4 B0:1 B1:2 B2:3 B3:4", 2, 2, 1),
    (round_robin, "F0:3 X3:4 B0:1 B1:2 B2:3", 3, 2, 0),
    (round_robin, "F0:1 X1:2 B0:1", 3, 2, 0),
]


@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_dealt_schedules_of_any_plan_are_not_below_it_either(data, num_layers, microbatches, workers):
    plan = data.draw(strategies.plans(num_layers))
    work, costs = Workload(plan.slots, microbatches), uniform_costs(plan, FORWARD, BACKWARD)
    best = shortest(plan, microbatches, workers)
    assert simulate(round_robin(work, workers), costs).makespan_s >= best
    assert best <= simulate(greedy(work, workers, costs), costs).makespan_s <= (2 - 1 / workers) * best


@pytest.mark.parametrize(("generator", "text", "microbatches", "workers", "gap"), CASES)
def test_no_schedule_is_below_the_optimum(generator, text, microbatches, workers, gap):
    plan = Plan.parse(text)
    work, costs = Workload(plan.slots, microbatches), uniform_costs(plan, FORWARD, BACKWARD)
    best = shortest(plan, microbatches, workers)
    assert simulate(generator(work, workers), costs).makespan_s == best + gap
    assert best <= simulate(greedy(work, workers, costs), costs).makespan_s <= (2 - 1 / workers) * best
