"""Simulators with one rule removed or changed, each of which the comparison with the second simulator must notice."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, chain, groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from oracle.random_schedules import Case, cases
from oracle.test_simpy import check_agrees

from rpfunc.errors import ScheduleError
from rpfunc.plan.hardware import Hardware
from rpfunc.schedule import Task, Workload, simulate
from rpfunc.schedule.activities import Activities, Followers, activities
from rpfunc.schedule.links import Links
from rpfunc.schedule.runs import Run, runs
from rpfunc.schedule.timeline import CHANNELS

TRANSFERS = importlib.import_module("rpfunc.schedule.transfers")
ACTIVITIES = importlib.import_module("rpfunc.schedule.activities")

Change = Callable[[pytest.MonkeyPatch], Callable[..., Any]]
"""Puts something wrong in place; returns the simulator to compare."""

WAITS = {
    "at_start": [("compute", "activation_upload"), ("compute", "parameter_upload")],
    "at_end": [
        ("compute", "compute"),
        ("activation_upload", "compute"),
        ("parameter_upload", "compute"),
        ("compute", "activation_download"),
        ("activation_download", "activation_upload"),
        ("compute", "gradient_download"),
        ("gradient_download", "update"),
        ("update", "update"),
        ("update", "parameter_upload"),
    ],
}
"""Every kind of wait that there is between activities."""


def with_waits(when: str, source: Callable[[Activities, int, int], int | None]) -> Change:
    """Puts for the source of each wait, between two activities, another one; None: takes the wait away."""

    def change(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
        def changed(*args: Any) -> Activities:
            todo = activities(*args)
            awaited = list(todo.awaited)
            followers: list[list[int]] = [[] for _ in awaited]
            for number, other in waits(todo, when):
                instead = source(todo, number, other)
                if instead is None:
                    awaited[other] -= 1
                else:
                    followers[instead].append(other)
            first = [0, *accumulate(map(len, followers))]
            return todo._replace(awaited=awaited, **{when: Followers(first, list(chain(*followers)))})

        patch.setattr(TRANSFERS, "activities", changed)
        return simulate

    return change


def waits(todo: Activities, when: str) -> Iterator[tuple[int, int]]:
    followers: Followers = getattr(todo, when)
    for number in range(len(todo.awaited)):
        for other in followers.waiting[followers.first[number] : followers.first[number + 1]]:
            yield number, other


def without_wait(when: str, before: str, after: str) -> Change:
    def source(todo: Activities, number: int, other: int) -> int | None:
        return None if (channel_of(todo, number), channel_of(todo, other)) == (before, after) else number

    return with_waits(when, source)


def channel_of(todo: Activities, number: int) -> str:
    return next(channel for channel, numbers in zip(CHANNELS, todo.ranges, strict=True) if number in numbers)


def own_outputs_stay(todo: Activities, number: int, other: int) -> int:
    """A worker reads its own outputs without the host."""
    computed, read, made, *_ = todo.ranges
    return number - 2 * len(computed) if number in made and other in read and own(todo, number, other) else number


def own(todo: Activities, number: int, other: int) -> bool:
    return todo.workers[number] == todo.workers[other]


def outputs_are_not_downloaded(todo: Activities, number: int, other: int) -> int:
    """Inputs are uploaded as soon as what they are made of has been computed."""
    computed, read, made, *_ = todo.ranges
    return number - 2 * len(computed) if number in made and other in read else number


def links(wrong: Callable[..., Links]) -> Change:
    def change(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
        patch.setattr(TRANSFERS, "Links", wrong)
        return simulate

    return change


class NoPause(Links):
    def __init__(self, *args: Any) -> None:
        *others, _, record = args
        super().__init__(*others, 10**9, record)


class ParametersFirst(Links):
    """Starts the highest number, so parameters before activations."""

    def add(self, number: int) -> None:
        super().add(number)
        self._waiting[self._workers[number]].sort(reverse=True)


class FirstComeFirstServed(Links):
    def add(self, number: int) -> None:
        waiting = self._waiting[self._workers[number]]
        super().add(number)
        waiting.remove(number)
        waiting.append(number)


class PauseStartsAnew(Links):
    def dispatch(self, now: float) -> None:
        before = list(self._bytes_left)
        super().dispatch(now)
        self._bytes_left[:] = before


class SameLink:
    """The other direction of a link that carries both."""

    def __init__(self, link: Links) -> None:
        self.is_instant, self.next_end, self.add, self.changed = link.is_instant, math.inf, link.add, False


def half_duplex(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    made: list[Any] = []

    def one_for_both(*args: Any) -> Any:
        made.append(SameLink(made[-1]) if len(made) % 2 else Links(*args))
        return made[-1]

    patch.setattr(TRANSFERS, "Links", one_for_both)
    return simulate


def hardware(**changes: Any) -> Change:
    def change(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
        return lambda schedule, costs, given, work: simulate(schedule, costs, replace(given, **changes), work)

    return change


class EqualPartForAll(Links):
    """Divides the host among all workers, busy or not."""

    def __init__(self, link: Any, host: Any, workers: list[int], *others: Any) -> None:
        super().__init__(min(link, host / (max(workers) + 1)), math.inf, workers, *others)


def runs_by_kind(schedule: Any, costs: Any, work: Any) -> list[Run]:
    """Does not count I and W as one slot."""
    found = []
    for run in runs(schedule, costs, work):
        start = run.start
        for kind, own in groupby(schedule.tasks[run.start : run.stop], lambda task: task.kind):
            stop = start + len(list(own))
            cost = costs[kind, schedule.tasks[start].stage]
            found.append(
                run._replace(
                    start=start, stop=stop, parameter_bytes=cost.parameter_bytes, gradient_bytes=cost.gradient_bytes
                )
            )
            start = stop
    return found


def runs_of_one_task(schedule: Any, costs: Any, work: Any) -> list[Run]:
    return [
        run._replace(start=place, stop=place + 1)
        for run in runs(schedule, costs, work)
        for place in range(run.start, run.stop)
    ]


def runs_across_iterations(schedule: Any, costs: Any, work: Any) -> list[Run]:
    return runs(schedule, costs, replace(work, num_microbatches=10**6))


def wrong_runs(wrong: Callable[..., list[Run]]) -> Change:
    def change(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
        patch.setattr(ACTIVITIES, "runs", wrong)
        return simulate

    return change


class NoOrderOfMicrobatches(Workload):
    def dependencies(self, task: Task) -> list[Task]:
        return [other for other in super().dependencies(task) if other.microbatch == task.microbatch]


class NoWaitForI(Workload):
    def dependencies(self, task: Task) -> list[Task]:
        return [other for other in super().dependencies(task) if task.kind != "W" or other.kind != "I"]


class OneBlock(Workload):
    @property
    def _block_size(self) -> tuple[int, int]:  # type: ignore[override]
        return self.num_microbatches, 0


class BufferNotTaken(Workload):
    def dependencies(self, task: Task) -> list[Task]:
        return [other for other in super().dependencies(task) if self.iteration(other) == self.iteration(task)]


class UpdateNotAwaited(Workload):
    def awaited_update(self, task: Task) -> int | None:
        return None


class OlderUpdate(Workload):
    def awaited_update(self, task: Task) -> int | None:
        awaited = super().awaited_update(task)
        return awaited - 1 if awaited else None


def workload(wrong: type[Workload]) -> Change:
    def change(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
        def simulator(schedule: Any, costs: Any, hardware: Hardware, work: Workload) -> Any:
            return simulate(schedule, costs, hardware, wrong(**vars_of(work)))

        return simulator

    return change


def vars_of(work: Workload) -> dict[str, Any]:
    return {name: getattr(work, name) for name in Workload.__dataclass_fields__}


EITHER_WAY: dict[str, Change] = {
    "no order of microbatches": workload(NoOrderOfMicrobatches),
    "W does not wait for I": workload(NoWaitForI),
    "one block": workload(OneBlock),
    "gradients of two iterations in a buffer": workload(BufferNotTaken),
    "update not awaited": workload(UpdateNotAwaited),
    "an older update awaited": workload(OlderUpdate),
    "updates at once": hardware(update=0),
}
"""Rules that hold with and without transfers."""

WITH_TRANSFERS: dict[str, Change] = {
    **{
        f"{after} does not wait for {before}, {when}": without_wait(when, before, after)
        for when, pairs in WAITS.items()
        for before, after in pairs
    },
    "a worker keeps its outputs": with_waits("at_end", own_outputs_stay),
    "outputs are there at once": with_waits("at_end", outputs_are_not_downloaded),
    "no pause": links(NoPause),
    "parameters first": links(ParametersFirst),
    "first come first served": links(FirstComeFirstServed),
    "a pause starts anew": links(PauseStartsAnew),
    "half duplex": half_duplex,
    "an equal part of the host for all": links(EqualPartForAll),
    "host not shared": hardware(host_upload=math.inf, host_download=math.inf),
    "no latency": hardware(latency=0),
    "I and W are two runs": wrong_runs(runs_by_kind),
    "parameters for each task": wrong_runs(runs_of_one_task),
    "parameters for several iterations": wrong_runs(runs_across_iterations),
}


def compare(simulator: Callable[..., Any], transfers: bool) -> None:
    """Compares with the second simulator, on more cases than the tests of the right one and without shrinking."""

    @settings(max_examples=300, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True)
    @given(cases(transfers=transfers))
    def agrees(case: Case) -> None:
        check_agrees(case, simulator)

    agrees()


@pytest.mark.parametrize("name", EITHER_WAY)
def test_a_wrong_computation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, ScheduleError)):
        compare(EITHER_WAY[name](monkeypatch), transfers=False)


@pytest.mark.parametrize("name", WITH_TRANSFERS | EITHER_WAY)
def test_wrong_transfers_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, ScheduleError)):
        compare((WITH_TRANSFERS | EITHER_WAY)[name](monkeypatch), transfers=True)


@given(cases())
def test_every_wait_is_of_a_kind_that_is_removed_above(case: Case) -> None:
    todo = activities(case.schedule, case.costs, case.hardware, case.work)
    for when, pairs in WAITS.items():
        found = {(channel_of(todo, number), channel_of(todo, other)) for number, other in waits(todo, when)}
        assert found <= set(pairs)
