"""The simulator gives the very times of a second one, which shares no code with it."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from oracle import simpy_simulator
from oracle.random_schedules import Case, cases

from rpfunc.schedule import Timeline, simulate


def check_agrees(case: Case, simulator: Callable[..., Timeline] = simulate) -> None:
    timeline = simulator(case.schedule, case.costs, case.hardware, case.work)
    rows = [(event.worker, event.channel, str(event.task), event.start_s, event.end_s) for event in timeline.events]
    assert sorted(rows) == simpy_simulator.simulate(case.schedule, case.costs, case.hardware, case.work)


@given(cases(transfers=False))
def test_computation_alone(case: Case) -> None:
    check_agrees(case)


@given(cases(shared=False))
def test_transfers_over_links_of_ones_own(case: Case) -> None:
    check_agrees(case)


@given(cases())
def test_transfers_that_share_the_host(case: Case) -> None:
    check_agrees(case)
