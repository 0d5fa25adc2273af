"""What holds for every schedule, whatever it costs."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from oracle import simpy_simulator
from oracle.random_schedules import Case, cases

from rpfunc.plan.hardware import Hardware
from rpfunc.schedule import simulate
from rpfunc.schedule.runs import runs
from rpfunc.schedule.simulate import compute_only
from rpfunc.schedule.transfers import with_transfers

UPLOADS = ("activation_upload", "parameter_upload")
DOWNLOADS = ("activation_download", "gradient_download")


@given(cases(transfers=False))
def test_transfers_at_an_infinite_rate_change_nothing(case: Case) -> None:
    schedule, costs, hardware, work = case
    assert with_transfers(schedule, costs, hardware, work) == compute_only(schedule, costs, hardware.update, work)


@given(cases())
def test_transfers_make_no_task_earlier(case: Case) -> None:
    schedule, costs, hardware, work = case
    free = {event[:3]: event.start_s for event in compute_only(schedule, costs, hardware.update, work).events}
    real = {event[:3]: event.start_s for event in simulate(*case).events}
    assert all(real[name] >= start for name, start in free.items())


@given(cases())
def test_a_link_does_one_thing_at_a_time_and_moves_every_byte(case: Case) -> None:
    schedule, costs, hardware, work = case
    alone = Hardware(hardware.upload, hardware.download, hardware.latency, prefetch=hardware.prefetch)
    timeline = simulate(schedule, costs, alone, work)
    links = defaultdict(list)
    for event in timeline.events:
        links[event.worker, "up" if event.channel in UPLOADS else event.channel in DOWNLOADS].append(event)
    for events in links.values():
        events.sort(key=lambda event: (event.start_s, event.end_s))
        assert all(before.end_s <= after.start_s for before, after in pairwise(events))
    for channels, rate, activations, others in (
        (UPLOADS, alone.upload, "input_bytes", "parameter_bytes"),
        (DOWNLOADS, alone.download, "output_bytes", "gradient_bytes"),
    ):
        moved = sum(event.end_s - event.start_s for event in timeline.events if event.channel in channels) * rate
        wanted = sum(getattr(costs[task.kind, task.stage], activations) for task in schedule.tasks)
        assert moved == wanted + sum(getattr(run, others) for run in runs(schedule, costs, work))


@given(cases())
def test_everything_takes_the_time_that_it_costs_after_what_it_needs(case: Case) -> None:
    timeline = simulate(*case)
    events = {event.task: event for event in timeline.events if event.channel == "compute"}
    updated = [event.end_s for event in timeline.events if event.channel == "update"]
    for task, event in events.items():
        assert event.end_s - event.start_s == case.costs[task.kind, task.stage].time
        assert all(events[other].end_s <= event.start_s for other in case.work.dependencies(task))
        awaited = case.work.awaited_update(task)
        assert awaited is None or not updated or updated[awaited] <= event.start_s


@given(cases(), st.integers(2, 5))
def test_time_has_no_unit(case: Case, factor: int) -> None:
    schedule, costs, hardware, work = case
    slower = {slot: cost._replace(time=cost.time * factor) for slot, cost in costs.items()}
    rates = ("upload", "download", "host_upload", "host_download")
    scaled = Hardware(
        **{rate: getattr(hardware, rate) / factor for rate in rates},
        latency=hardware.latency * factor,
        update=hardware.update * factor,
        prefetch=hardware.prefetch,
        prefetch_runs=hardware.prefetch_runs,
    )
    wanted = [(*event[:3], event.start_s * factor, event.end_s * factor) for event in simulate(*case).events]
    assert wanted == list(map(tuple, simulate(schedule, slower, scaled, work).events))


@given(cases(shared=False))
def test_whole_numbers_give_the_times_of_fractions(case: Case) -> None:
    """With bytes that are multiples of the rates, so that all times are whole."""
    schedule, costs, hardware, work = case
    rates = {"parameter": hardware.upload, "input": hardware.upload, "gradient": hardware.download}
    rates["output"] = hardware.download
    whole = {
        slot: cost._replace(
            time=int(cost.time),
            **{f"{what}_bytes": int(getattr(cost, f"{what}_bytes") * rate) for what, rate in rates.items()},
        )
        for slot, cost in costs.items()
    }
    numbers = Hardware(
        int(hardware.upload),
        int(hardware.download),
        int(hardware.latency),
        prefetch=hardware.prefetch,
        prefetch_runs=hardware.prefetch_runs,
        update=int(hardware.update),
    )
    events = simulate(schedule, whole, numbers, work).events
    exact = {
        slot: cost._replace(**{f"{what}_bytes": Fraction(getattr(cost, f"{what}_bytes")) for what in rates})
        for slot, cost in whole.items()
    }
    rows = [(event.worker, event.channel, str(event.task), event.start_s, event.end_s) for event in events]
    assert sorted(rows) == simpy_simulator.simulate(schedule, exact, hardware, work)
