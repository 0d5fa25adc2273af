"""Models planned jointly are scheduled, checked and simulated as one sequence of slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Plan
from rpfunc.errors import PlanError
from rpfunc.plan import LayerCost, joint_costs, joint_slots, partition_jointly, stage_costs
from rpfunc.schedule import Workload, greedy, round_robin, simulate, validate

models = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=3)


@given(models, st.data(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 2))
def test_joint_plans_are_scheduled_and_take_as_long_as_their_slots(times, data, num_workers, microbatches, iterations):
    trained = [data.draw(st.booleans()) for _ in times[:-1]] + [True]
    layers = [[LayerCost.of_forward(time) for time in model] for model in times]
    plans = partition_jointly(layers, num_workers, trained)
    slots, costs = joint_slots(plans), joint_costs(plans, layers)
    assert len(set(slots)) == len(slots) == sum(len(plan.slots) for plan in plans)
    work = Workload(slots, microbatches, num_iterations=iterations)
    for schedule in (round_robin(work, num_workers), greedy(work, num_workers, costs)):
        validate(schedule, work)
    alone = simulate(round_robin(work, 1), costs, work=work)
    own = [
        stage_costs(plan, model)[slot].time for plan, model in zip(plans, layers, strict=True) for slot in plan.slots
    ]
    assert alone.makespan_s == iterations * microbatches * sum(own)


def test_stages_of_the_second_plan_follow_those_of_the_first():
    reference, policy = Plan.parse("F0:1 F1:3"), Plan.parse("F0:2 X2:3 B0:1 B1:2")
    assert joint_slots([reference, policy]) == [("F", 0), ("F", 1), ("F", 2), ("X", 3), ("B", 3), ("B", 2)]
    assert joint_slots([policy]) == policy.slots


def test_what_cannot_be_is_named():
    with pytest.raises(PlanError, match="joint plan: has no plan, needs at least one"):
        joint_slots([])
    with pytest.raises(PlanError, match="joint plan: has 1 plans and 2 models, needs one plan for each model"):
        joint_costs([Plan.single(1)], [[], []])
    with pytest.raises(PlanError, match="joint plan: plan 1 has no stage, needs at least one"):
        joint_slots([Plan.single(1), Plan((), None, ())])
    with pytest.raises(PlanError) as caught:
        partition_jointly(None, 2, True)
    assert str(caught.value) == (
        "partition: 2 problems\n  - models is None, it must be a sequence\n  - trained is True, it must be a sequence"
    )
