"""The plan that measures itself: which plan follows which timelines, and that no result depends on it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Plan, State, optim, train_steps, tree
from rpfunc.plan import partition
from rpfunc.plan.costs import LayerCost, stage_costs
from rpfunc.schedule import Workload, round_robin, simulate
from rpfunc.testing import exact
from rpfunc.train import auto_plan, steps
from rpfunc.train.auto_plan import MEASURED_STEPS, PATIENCE, AutoPlan, advance
from rpfunc.train.options import DataOptions, ExecutionOptions, TrainOptions

EVEN = [LayerCost.of_forward(1.0) for _ in range(6)]
HEAVY_HEAD = [*EVEN[:-1], LayerCost.of_forward(4.0)]
ONE_EACH = Plan.cut(6, range(6), range(6))


def step(state, costs, workers=3, microbatches=4):
    """The state after a step in which layers took these times."""
    schedule = round_robin(Workload(state.plan.slots, microbatches), workers)
    return advance(state, simulate(schedule, stage_costs(state.plan, costs)))


def after(state, costs, num_steps):
    for _ in range(num_steps):
        state = step(state, costs)
    return state


def test_the_first_steps_have_one_layer_a_stage_and_the_next_what_their_times_ask_for():
    state = AutoPlan.begin(6, workers=3)
    for _ in range(MEASURED_STEPS):
        assert state.plan == ONE_EACH
        state = step(state, HEAVY_HEAD)
    assert state.plan == partition(HEAVY_HEAD, 3, 4)
    assert state.plan != partition(EVEN, 3, 4)


def test_what_the_first_step_takes_does_not_count():
    state = step(AutoPlan.begin(6, workers=3), [replace(EVEN[0], forward=99.0), *EVEN[1:]])
    assert after(state, EVEN, MEASURED_STEPS - 1).plan == partition(EVEN, 3, 4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 5))
def test_a_plan_stays_while_layers_take_what_they_took(forwards, workers, microbatches):
    costs = [LayerCost.of_forward(float(forward)) for forward in forwards]
    state = AutoPlan.begin(len(costs), workers)
    for _ in range(MEASURED_STEPS):
        state = step(state, costs, workers, microbatches)
    chosen = state.plan
    assert chosen == partition(costs, workers, microbatches)
    for _ in range(3 * PATIENCE):
        state = step(state, costs, workers, microbatches)
        assert state.plan == chosen


def test_a_machine_that_is_slower_as_a_whole_needs_no_other_plan():
    state = after(AutoPlan.begin(6, workers=3), EVEN, MEASURED_STEPS)
    slower = [LayerCost.of_forward(3.0) for _ in EVEN]
    assert after(state, slower, 2 * PATIENCE).plan == state.plan


def test_times_that_drift_for_long_enough_are_measured_anew_and_ever_more_rarely():
    state = after(AutoPlan.begin(6, workers=3), EVEN, MEASURED_STEPS)
    state = after(state, HEAVY_HEAD, PATIENCE - 1)
    assert state.plan == partition(EVEN, 3, 4)
    state = step(state, HEAVY_HEAD)
    assert state.plan == ONE_EACH
    state = after(state, HEAVY_HEAD, MEASURED_STEPS)
    assert state.plan == partition(HEAVY_HEAD, 3, 4)
    state = after(state, EVEN, 2 * PATIENCE - 1)
    assert state.plan == partition(HEAVY_HEAD, 3, 4)
    assert step(state, EVEN).plan == ONE_EACH


def test_steps_that_drift_now_and_then_change_nothing():
    state = after(AutoPlan.begin(6, workers=3), EVEN, MEASURED_STEPS)
    for _ in range(3):
        state = step(after(state, HEAVY_HEAD, PATIENCE - 1), EVEN)
    assert state.plan == partition(EVEN, 3, 4)


def smooth_state():
    generator = torch.Generator().manual_seed(0)
    params = tree.map(lambda leaf: torch.randn(leaf.shape, generator=generator), exact.init())
    return State.create(params, optim.adamw(1e-2))


def train(plan, workers):
    steps = train_steps(
        smooth_state(),
        [exact.batch(5, 4, seed=seed) for seed in range(8)],
        model=exact.model(),
        objective=exact.linear(),
        optimizer=optim.adamw(1e-2),
        plan=plan,
        workers=workers,
        microbatches=3,
    )
    states, results = zip(*steps, strict=True)
    plans = [{(event.task.kind, event.task.stage) for event in result.timeline.events} for result in results]
    return tree.leaves(dict(states[-1].params)), [result.loss for result in results], plans


@pytest.mark.parametrize(("workers", "tolerance"), [(1, 0.4), (3, 0.4), (2, -1.0)])
def test_training_has_the_same_bits_whatever_was_measured(workers, tolerance, monkeypatch):
    """A tolerance of -1 has every step drift, so that layers are measured again and again."""
    monkeypatch.setattr(auto_plan, "TOLERANCE", tolerance)
    params, losses, plans = train("auto", workers)
    wanted_params, wanted_losses, _ = train("X0:4", None)
    assert losses == wanted_losses
    assert all(torch.equal(*pair) for pair in zip(params, wanted_params, strict=True))
    each = set(Plan.cut(4, range(4), range(4)).slots)
    assert plans[:MEASURED_STEPS] == [each] * MEASURED_STEPS
    assert plans[MEASURED_STEPS] != each or workers > 1
    if tolerance < 0:
        assert plans[MEASURED_STEPS + PATIENCE] == each


@pytest.mark.parametrize("workers", [None, 1, 2, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_that_are_under_way_when_the_plan_changes_do_not_count(workers, asynchronous, monkeypatch):
    """Measured anew in each step: the next iteration is always one of the plan before."""
    monkeypatch.setattr(auto_plan, "TOLERANCE", -1.0)
    monkeypatch.setattr(auto_plan, "PATIENCE", 1)
    optimizer, plans = optim.sgd(0.125), []

    def watched(state, timeline):
        plans.append(str(state.plan))
        return advance(state, timeline)

    monkeypatch.setattr(steps, "advance", watched)
    how = {"model": exact.model(), "objective": exact.linear(), "optimizer": optimizer, "asynchronous": asynchronous}
    batches = [exact.batch(4, 3, seed=number) for number in range(12)]
    *_, (found, _) = train_steps(
        State.create(exact.init(), optimizer), batches, **how, workers=workers, microbatches=2, plan="auto"
    )
    *_, (wanted, _) = train_steps(State.create(exact.init(), optimizer), batches, **how, microbatches=2)
    assert len(set(plans)) > 1
    assert all(a.equal(b) for a, b in zip(tree.leaves(found.params), tree.leaves(wanted.params), strict=True))


def test_a_training_run_may_ask_for_it():
    data = DataOptions(text="some.txt")
    TrainOptions(data=data, execution=ExecutionOptions(plan="auto")).check()
