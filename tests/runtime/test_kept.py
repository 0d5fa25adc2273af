"""What an iteration keeps between tasks, and for how long."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Plan, reference
from rpfunc.runtime.execution import Execution
from rpfunc.runtime.iteration import Iteration
from rpfunc.runtime.operations import operations
from rpfunc.runtime.tasks import Work
from rpfunc.schedule import Schedule, Workload
from rpfunc.schedule.validate import halved_as
from rpfunc.stream.streaming import Streaming
from rpfunc.testing import assert_equal, exact, strategies
from rpfunc.testing.schedules import runnable_schedules, unfused_plans

MODEL, PARAMS, BATCH, OBJECTIVE = exact.model(), exact.init(), exact.batch(3, 4), exact.linear()


def begin(plan, schedule, num_microbatches=3, recompute="stage"):
    workload = halved_as(schedule, Workload(plan.slots, num_microbatches))
    work = Work(MODEL, OBJECTIVE, plan, Streaming(), recompute, workload)
    return Iteration(work, PARAMS, BATCH.microbatches(num_microbatches), OBJECTIVE.total(BATCH))


def run_on(iteration, tasks):
    lines, _ = operations(0, Schedule((tuple(tasks),)), iteration.work, [True])
    perform = Execution(iteration, [None])
    with torch.no_grad():
        for operation in lines[0]["compute"]:
            perform(operation)


@given(st.data())
def test_the_last_reader_lets_go_of_whatever_was_kept(data):
    plan = data.draw(strategies.plans(4) | unfused_plans(4), "plan")
    schedule = data.draw(runnable_schedules(Workload(plan.slots, 3), 1), "schedule")
    iteration = begin(plan, schedule, recompute=data.draw(st.sampled_from(["stage", "layer", "none"]), "recompute"))
    run_on(iteration, schedule.tasks)
    kept = vars(iteration)
    assert (kept["_activations"], kept["_pullbacks"], kept["_held"]) == ({}, {}, {})
    wanted_loss, wanted = reference.value_and_grad(MODEL, OBJECTIVE)(PARAMS, BATCH)
    assert_equal({"loss": iteration.loss(), **iteration.grads()}, {"loss": wanted_loss, **wanted})


def test_recomputing_keeps_stage_inputs_and_nothing_else_between_forward_and_backward():
    plan, schedule = Plan.symmetric(4, [0, 1, 3]), Schedule.parse("0F0 1F0 2F0 2I0 2W0 1I0 1W0 0B0")
    iteration = begin(plan, schedule, 1)
    run_on(iteration, schedule.tasks[:3])
    assert vars(iteration)["_activations"].keys() == {(1, 0), (3, 0)}
    assert not vars(iteration)["_pullbacks"]


def test_residuals_are_kept_for_whole_backward_passes_and_the_head_has_none():
    plan, schedule = Plan.symmetric(4, [0, 1, 3]), Schedule.parse("0F0 1F0 2F0 2B0 1I0 1W0 0B0")
    iteration = begin(plan, schedule, 1, recompute="none")
    run_on(iteration, schedule.tasks[:3])
    assert vars(iteration)["_pullbacks"].keys() == {(0, 0)}
    assert vars(iteration)["_activations"].keys() == {(1, 0), (3, 0)}


def test_the_last_forward_stage_scores_its_output():
    for plan in (Plan.symmetric(4, [0, 2]), Plan.symmetric(4, [0, 3]), Plan.symmetric(4, [0])):
        schedule = Schedule((tuple(Workload(plan.slots, 3).tasks),))
        iteration = begin(plan, schedule)
        run_on(iteration, [task for task in schedule.tasks if task.kind == "F"])
        assert iteration.loss() == reference.value_and_grad(MODEL, OBJECTIVE)(PARAMS, BATCH)[0]


def test_every_layers_input_is_kept_where_layers_are_the_grain():
    plan, schedule = Plan.symmetric(4, [0, 1, 3]), Schedule.parse("0F0 1F0 2F0 2B0 1I0 1W0 0B0")
    iteration = begin(plan, schedule, 1, recompute="layer")
    run_on(iteration, schedule.tasks[:3])
    assert not vars(iteration)["_pullbacks"]
    assert vars(iteration)["_activations"].keys() == {(1, 0), (2, 0), (3, 0)}
