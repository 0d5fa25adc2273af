"""Validators with one rule left out, or slightly wrong: the table of broken schedules must catch each of them."""

from importlib import import_module

import pytest
from broken_schedules import BROKEN

from rpfunc.errors import ScheduleError
from rpfunc.schedule import Workload, validate
from rpfunc.schedule.grid import Faults

VALIDATE, ORDER = import_module("rpfunc.schedule.validate"), import_module("rpfunc.schedule.order")
NOTHING = Faults([], 0)


def caught():
    """The names of the broken schedules about which `validate` does not say what it should."""
    names = set()
    for broken in BROKEN:
        try:
            validate(broken.schedule, broken.work, **broken.options)
            names.add(broken.name)
        except ScheduleError as error:
            if str(error) != broken.message:
                names.add(broken.name)
    return names


def without_kind(index):
    right = VALIDATE._stand

    def stand(schedule, work):
        standing, kinds = right(schedule, work)
        return standing, [NOTHING if kind == index else faults for kind, faults in enumerate(kinds)]

    return VALIDATE, "_stand", stand


def without_order_fault(index):
    right = VALIDATE.order_faults
    return (
        VALIDATE,
        "order_faults",
        lambda standing: tuple(NOTHING if kind == index else faults for kind, faults in enumerate(right(standing))),
    )


def without_needs(unneeded):
    right = Workload.dependencies
    return (
        Workload,
        "dependencies",
        lambda work, task: [need for need in right(work, task) if not unneeded(work, task, need)],
    )


def with_a_higher_limit():
    right = VALIDATE._overfull
    return VALIDATE, "_overfull", lambda standing, limit: right(standing, limit + 1)


WRONG = {
    "missing tasks pass": without_kind(0),
    "repeated tasks pass": without_kind(1),
    "foreign tasks pass": without_kind(2),
    "halves never pass": (VALIDATE, "halved_as", lambda schedule, work: work),
    "early tasks pass": without_order_fault(0),
    "deadlocks pass": without_order_fault(1),
    "nothing waits for an update": (Workload, "awaited_update", lambda work, task: None),
    "every iteration is synchronous": (
        Workload,
        "awaited_update",
        lambda work, task: task.microbatch // work.num_microbatches - 1 if work.iteration(task) else None,
    ),
    "updates count across workers only": (ORDER, "_hasty", lambda standing: {}),
    "gradients may come in any order": without_needs(lambda work, task, need: need.microbatch != task.microbatch),
    "gradients of two iterations may go into a buffer": without_needs(
        lambda work, task, need: work.iteration(need) != work.iteration(task)
    ),
    "forward needs nothing": without_needs(lambda work, task, need: task.kind == "F"),
    "backward needs nothing of its microbatch": without_needs(
        lambda work, task, need: task.kind in "BI" and need.microbatch == task.microbatch
    ),
    "the fused stage needs no forward": without_needs(lambda work, task, need: task.kind == "X" and need.kind == "F"),
    "W needs no I": without_needs(lambda work, task, need: task.kind == "W" and need.kind == "I"),
    "any cycle will do": (ORDER, "MOST_STARTS", 0),
    "bound weights may be anywhere": (VALIDATE, "_spread", lambda standing: NOTHING),
    "memory has no limit": (VALIDATE, "_overfull", lambda standing, in_flight: NOTHING),
    "memory holds one more": with_a_higher_limit(),
    "the grid marks nothing": (VALIDATE, "grid", lambda schedule, marked: ""),
}


def test_the_right_validator_is_not_caught():
    assert caught() == set()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_validator_without_a_rule_is_caught(wrong, monkeypatch):
    monkeypatch.setattr(*WRONG[wrong])
    assert caught()
