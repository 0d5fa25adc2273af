"""Plans of several models that run in one iteration: their slots as one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from rpfunc.errors import PlanError
from rpfunc.plan.costs import LayerCost, StageCost, stage_costs
from rpfunc.plan.plan import Plan


def joint_slots(plans: Sequence[Plan]) -> list[tuple[str, int]]:
    """Returns the slots of all plans, one plan after the other; each plan's stages are numbered on from those before.

    A microbatch passes them in this order: a reference model comes before the policy that is compared with it. The
    slots of a `Workload`, which any generator for asymmetric plans schedules. Raises PlanError for no plan.

    >>> policy, reference = Plan.parse("F0:3 X3:4 B0:1 B1:3"), Plan.parse("F0:2 F2:4")
    >>> print(*(f"{stage}{kind}" for kind, stage in joint_slots([reference, policy])))
    0F 1F 2F 3X 3B 2B
    """
    return [
        (kind, first + stage) for plan, first in zip(plans, _firsts(plans), strict=True) for kind, stage in plan.slots
    ]


def joint_costs(plans: Sequence[Plan], models: Sequence[Sequence[LayerCost]]) -> dict[tuple[str, int], StageCost]:
    """Returns what each stage of all plans costs, numbered as in `joint_slots`, given the layers of each model.

    Raises PlanError as `stage_costs` does, and if there are not as many plans as models.
    """
    if len(plans) != len(models):
        raise PlanError(f"joint plan: has {len(plans)} plans and {len(models)} models, needs one plan for each model")
    return {
        (kind, first + stage): cost
        for plan, layers, first in zip(plans, models, _firsts(plans), strict=True)
        for (kind, stage), cost in stage_costs(plan, layers).items()
    }


def _firsts(plans: Sequence[Plan]) -> list[int]:
    """Returns the number of each plan's first stage."""
    if not plans:
        raise PlanError("joint plan: has no plan, needs at least one")
    problems = [
        f"plan {number} has no stage, needs at least one" for number, plan in enumerate(plans) if not plan.slots
    ]
    if problems:
        raise PlanError.listing("joint plan", problems)
    stages = [1 + max(stage for _, stage in plan.slots) for plan in plans]
    return list(accumulate(stages[:-1], initial=0))
