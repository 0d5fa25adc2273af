"""The plan that measures itself: one layer a stage at first, then what suits the times that were found."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rpfunc.plan.costs import LayerCost
from rpfunc.plan.partition import partition
from rpfunc.plan.plan import Plan
from rpfunc.plan.profile import drift, profile_costs
from rpfunc.schedule.timeline import Timeline

MEASURED_STEPS = 2
"""Steps with one layer a stage; the last is measured, the first warms up."""

TOLERANCE = 0.4
"""Drift, as a share of the slowest slot, that a plan may have; see `rpfunc.plan.profile.drift`."""

PATIENCE = 5
"""Steps in a row beyond the tolerance after which layers are measured anew; doubled by each measurement."""


@dataclass(frozen=True)
class AutoPlan:
    """A plan for the next step, and what it rests on.

    plan      one layer a stage while layers are measured, then `partition` of their costs; no result depends on it
    workers   that it is made for
    costs     of the layers, in seconds a microbatch; empty while they are measured
    count     steps measured so far, or steps in a row that have drifted
    patience  such steps that are borne
    """

    plan: Plan
    workers: int
    costs: tuple[LayerCost, ...] = ()
    count: int = 0
    patience: int = PATIENCE

    @classmethod
    def begin(cls, num_layers: int, workers: int) -> AutoPlan:
        """Returns the state before the first step."""
        return cls(Plan.cut(num_layers, range(num_layers), range(num_layers)), workers)


def advance(state: AutoPlan, timeline: Timeline) -> AutoPlan:
    """Returns the state after a step with its plan, whose timeline was this. Source: own, after RoundPipe.

    Layers are measured anew if `drift` exceeds TOLERANCE for `patience` steps on end. Costs that no measurement
    predicts are measured ever more rarely, since patience grows.
    """
    if not state.costs:
        if state.count + 1 < MEASURED_STEPS:
            return replace(state, count=state.count + 1)
        costs = tuple(profile_costs(timeline, state.plan))
        microbatches = len({event.task.microbatch for event in timeline.events})
        return replace(state, plan=partition(costs, state.workers, microbatches), costs=costs, count=0)
    if drift(state.costs, timeline, state.plan) <= TOLERANCE:
        return replace(state, count=0)
    if state.count + 1 < state.patience:
        return replace(state, count=state.count + 1)
    return replace(AutoPlan.begin(len(state.costs), state.workers), patience=2 * state.patience)
