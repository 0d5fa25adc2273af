"""Small schedules whose times can be followed by hand."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction

import pytest

from rpfunc import Plan
from rpfunc.errors import PlanError, ScheduleError
from rpfunc.plan.costs import StageCost, uniform_costs
from rpfunc.plan.hardware import Hardware
from rpfunc.schedule import Schedule, Workload, round_robin, simulate
from rpfunc.schedule.timeline import HOST

PLAN = Plan.parse("F0:2 X2:3 B0:2")
COSTS = {("F", 0): StageCost(1), ("X", 1): StageCost(2), ("B", 0): StageCost(3)}


def rows(text, costs, hardware=None, work=None):
    """Returns "worker channel task start-end", in the timeline's order, without updates."""
    timeline = simulate(Schedule.parse(text), costs, *([] if hardware is None else [hardware]), work=work)
    return [
        f"{event.worker} {event.channel} {event.task} {float(event.start_s):g}-{float(event.end_s):g}"
        for event in timeline.events
        if event.channel != "update"
    ]


def updates(timeline):
    return [(str(e.task), e.start_s, e.end_s) for e in timeline.events if e.worker == HOST and e.channel == "update"]


def test_a_task_waits_for_its_worker_and_for_what_it_needs():
    assert rows("0F0 0F1 0B0 0B1\n1X0 1X1", COSTS) == [
        "0 compute 0F0 0-1",
        "0 compute 0F1 1-2",
        "0 compute 0B0 3-6",
        "0 compute 0B1 6-9",
        "1 compute 1X0 1-3",
        "1 compute 1X1 3-5",
    ]


def test_gradients_are_summed_in_the_order_of_microbatches():
    """1X1 could start at 1, but follows 1X0, which waits for 0F0."""
    assert rows("0F1 0F0\n1X0\n1X1\n0B0 0B1", COSTS)[2:4] == ["1 compute 1X0 2-4", "2 compute 1X1 4-6"]


def test_blocks_are_summed_apart():
    work = Workload(PLAN.slots, 2, num_blocks=2)
    assert rows("0F1 0F0\n1X0\n1X1\n0B0 0B1", COSTS, work=work)[2:4] == ["1 compute 1X0 2-4", "2 compute 1X1 1-3"]


def test_whole_numbers_stay_whole_and_fractions_exact():
    third = {slot: StageCost(Fraction(cost.time, 3)) for slot, cost in COSTS.items()}
    for costs, kind in ((COSTS, int), (third, Fraction)):
        timeline = simulate(Schedule.parse("0F0 0B0\n1X0"), costs)
        assert {type(event.end_s) for event in timeline.events} == {kind}
    assert timeline.makespan_s == 2
    assert timeline.bubble == Fraction(1, 2)


def test_an_iteration_waits_for_the_update_before():
    work = Workload(PLAN.slots, 1, num_iterations=3, staleness=0)
    timeline = simulate(round_robin(work, 1), COSTS, Hardware(update=10), work)
    assert updates(timeline) == [("0B0", 6, 16), ("0B1", 22, 32), ("0B2", 38, 48)]
    assert [event.start_s for event in timeline.events if event.task.kind == "F"] == [0, 16, 32]
    assert timeline.makespan_s == 48


def test_a_stale_iteration_waits_for_the_update_before_that():
    work = Workload(PLAN.slots, 1, num_iterations=3, staleness=1)
    timeline = simulate(round_robin(work, 1), COSTS, Hardware(update=10), work)
    assert [event.start_s for event in timeline.events if event.task.kind == "F"] == [0, 6, 16]
    assert updates(timeline) == [("0B0", 6, 16), ("0B1", 16, 26), ("0B2", 26, 36)]


def test_an_update_is_no_part_of_the_bubble():
    timeline = simulate(Schedule.parse("0F0 1X0 0B0"), COSTS, Hardware(update=10))
    assert (timeline.makespan_s, timeline.bubble) == (16, 0)


def test_work_without_gradients_has_no_updates():
    work = Workload([("F", 0), ("F", 1)], 2, num_iterations=3)
    timeline = simulate(
        round_robin(work, 2), {("F", 0): StageCost(1), ("F", 1): StageCost(1)}, Hardware(update=9), work
    )
    assert updates(timeline) == []
    assert timeline.makespan_s == 7


def test_halves_need_not_be_announced():
    costs = {("F", 0): StageCost(1), ("I", 0): StageCost(1), ("W", 0): StageCost(1)}
    work = Workload([("F", 0), ("B", 0)], 2)
    assert rows("0F0 0F1 0I0 0I1 0W0 0W1", costs, work=work)[-1] == "0 compute 0W1 5-6"


def test_parameters_come_first_and_those_of_the_next_run_during_it():
    costs = {("F", 0): StageCost(5, 4), ("X", 1): StageCost(5, 6), ("B", 0): StageCost(5, 4)}
    assert rows("0F0 1X0 0B0", costs, Hardware(upload=2)) == [
        "0 compute 0F0 2-7",
        "0 compute 1X0 7-12",
        "0 compute 0B0 12-17",
        "0 parameter_upload 0F0 0-2",
        "0 parameter_upload 1X0 2-5",
        "0 parameter_upload 0B0 7-9",
    ]


def test_more_runs_may_be_uploaded_ahead():
    costs = {("F", 0): StageCost(5, 4), ("X", 1): StageCost(5, 6), ("B", 0): StageCost(5, 4)}
    uploads = rows("0F0 1X0 0B0", costs, Hardware(upload=2, prefetch_runs=2))[3:]
    assert uploads == ["0 parameter_upload 0F0 0-2", "0 parameter_upload 1X0 2-5", "0 parameter_upload 0B0 5-7"]


def test_activations_go_through_the_host_and_arrive_late_by_the_latency():
    costs = {("F", 0): StageCost(1, output_bytes=2), ("X", 1): StageCost(1, input_bytes=4)}
    work = Workload([("F", 0), ("X", 1)], 1)
    hardware = Hardware(upload=1, download=1, latency=3)
    assert rows("0F0\n1X0", costs, hardware, work) == [
        "0 compute 0F0 0-1",
        "0 activation_download 0F0 1-3",
        "1 compute 1X0 13-14",
        "1 activation_upload 1X0 6-10",
    ]
    assert rows("0F0 1X0", costs, hardware, work) == [  # the same on one worker
        "0 compute 0F0 0-1",
        "0 compute 1X0 13-14",
        "0 activation_upload 1X0 6-10",
        "0 activation_download 0F0 1-3",
    ]


def test_inputs_are_uploaded_so_many_tasks_ahead():
    costs = {("F", 0): StageCost(5, input_bytes=2)}
    work = Workload([("F", 0)], 4)
    one = rows("0F0 0F1 0F2 0F3", costs, Hardware(upload=1), work)[4:]
    assert one == [f"0 activation_upload 0F{m} {at}" for m, at in enumerate(("0-2", "2-4", "7-9", "12-14"))]
    two = rows("0F0 0F1 0F2 0F3", costs, Hardware(upload=1, prefetch=2), work)[4:]
    assert two == [f"0 activation_upload 0F{m} {at}" for m, at in enumerate(("0-2", "2-4", "4-6", "7-9"))]


def test_activations_pause_parameters_which_then_go_on():
    """While 20 bytes of parameters for 1X0 go up, the inputs of 0F1 and 0F2 pass."""
    costs = {("F", 0): StageCost(5, input_bytes=2), ("X", 1): StageCost(1, 20)}
    work = Workload([("F", 0), ("X", 1)], 3)
    found = rows("0F0 0F1 0F2 1X0 1X1 1X2", costs, Hardware(upload=1), work)
    assert [row for row in found if "upload" in row] == [
        "0 activation_upload 0F0 0-2",
        "0 activation_upload 0F1 2-4",
        "0 activation_upload 0F2 7-9",
        "0 parameter_upload 1X0 4-7",
        "0 parameter_upload 1X0 9-26",
    ]


def test_up_and_down_do_not_hinder_each_other():
    costs = {("F", 0): StageCost(1, output_bytes=9), ("X", 1): StageCost(1, 9)}
    work = Workload([("F", 0), ("X", 1)], 1)
    found = rows("0F0 1X0", costs, Hardware(upload=1, download=1), work)
    assert found[2:] == ["0 activation_download 0F0 1-10", "0 parameter_upload 1X0 0-9"]


def test_workers_that_transfer_share_the_host():
    """Alone each of 4 bytes would take 2; both together are limited by the host: 1.5 each, then 2 for the rest."""
    costs = {("F", 0): StageCost(1, 3), ("F", 1): StageCost(1, 5)}
    work = Workload([("F", 0), ("F", 1)], 1)
    found = rows("0F0\n1F0", costs, Hardware(upload=2, host_upload=3), work)
    assert [row for row in found if "upload" in row] == ["0 parameter_upload 0F0 0-2", "1 parameter_upload 1F0 0-3"]


def test_gradients_are_downloaded_after_the_run_and_before_the_update():
    costs = {("X", 0): StageCost(1, gradient_bytes=4)}
    timeline = simulate(Schedule.parse("0X0 0X1"), costs, Hardware(download=2, update=5))
    assert rows("0X0 0X1", costs, Hardware(download=2))[-1] == "0 gradient_download 0X1 2-4"
    assert updates(timeline) == [("0X1", 4, 9)]


def test_i_and_w_of_a_stage_are_one_run_and_w_reads_what_i_read():
    costs = {
        ("F", 0): StageCost(1, output_bytes=1),
        ("I", 0): StageCost(2, 3, input_bytes=1, output_bytes=5),
        ("W", 0): StageCost(2, 3, 3, input_bytes=1),
    }
    assert rows("0F0 0I0 0W0", costs, Hardware(upload=1, download=1)) == [
        "0 compute 0F0 0-1",
        "0 compute 0I0 4-6",
        "0 compute 0W0 6-8",
        "0 activation_upload 0I0 2-3",
        "0 activation_upload 0W0 4-5",  # not after the download of what 0I0 hands on
        "0 activation_download 0F0 1-2",
        "0 activation_download 0I0 6-11",
        "0 parameter_upload 0I0 0-2",
        "0 parameter_upload 0I0 3-4",
        "0 gradient_download 0W0 11-14",
    ]


def test_parameters_of_an_iteration_wait_for_the_update_that_it_reads():
    costs = {("X", 0): StageCost(2, 1, 1)}
    work = Workload([("X", 0)], 1, num_iterations=2)
    timeline = simulate(Schedule.parse("0X0 0X1"), costs, Hardware(upload=1, download=1, update=5), work)
    assert updates(timeline) == [("0X0", 4, 9), ("0X1", 13, 18)]
    assert [event.start_s for event in timeline.events if event.channel == "parameter_upload"] == [0, 9]


def test_nothing_is_uploaded_or_waited_for_where_there_are_no_bytes():
    assert rows("0F0 0B0\n1X0", COSTS, Hardware(upload=1, download=1, latency=7)) == rows("0F0 0B0\n1X0", COSTS)


def test_latency_counts_without_a_rate():
    costs = {("X", 0): StageCost(1, 5)}
    assert rows("0X0", costs, Hardware(latency=2)) == ["0 compute 0X0 2-3"]


def test_there_may_be_more_prefetch_than_tasks():
    costs = {slot: cost._replace(input_bytes=1, parameter_bytes=1) for slot, cost in COSTS.items()}
    timeline = simulate(
        Schedule.parse("0F0 0F1 0B0 0B1\n1X0 1X1"), costs, Hardware(upload=9, prefetch=99, prefetch_runs=99)
    )
    assert len([event for event in timeline.events if event.channel == "compute"]) == 6


@pytest.mark.parametrize("hardware", [Hardware(), Hardware(upload=1.0)])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0", "1X0 is missing"),
        ("0F0 1X0 0B0 1X0", "1X0 stands 2 times"),
        ("0F0 1X0 0B0 0F1", "0F1 is no part of the work"),
        ("1X0 0F0\n0B0", "worker 0 has 1X0 (place 0) before 0F0 (place 1)"),
        ("", "0F0 is missing"),
    ],
)
def test_a_schedule_that_cannot_be_run_is_refused_as_by_validate(text, message, hardware):
    with pytest.raises(ScheduleError) as caught:
        simulate(Schedule.parse(text), COSTS, hardware, Workload(PLAN.slots, 1))
    assert message in str(caught.value)


@pytest.mark.parametrize("hardware", [Hardware(), Hardware(upload=1.0)])
def test_an_iteration_before_the_update_that_it_awaits_never_starts(hardware):
    work = Workload([("X", 0), ("B", 0)], 1, num_iterations=2)
    with pytest.raises(ScheduleError, match="update of iteration 0"):
        simulate(Schedule.parse("0X0 0X1 0B0 0B1"), {("X", 0): StageCost(1), ("B", 0): StageCost(1)}, hardware, work)


def test_every_missing_cost_is_named():
    with pytest.raises(PlanError) as caught:
        simulate(Schedule.parse("0F0 0B0\n1X0"), {("F", 0): StageCost(1)})
    assert str(caught.value) == (
        "costs: 2 problems\n"
        "  - ('B', 0) is missing, tasks that need it: 1\n"
        "  - ('X', 1) is missing, tasks that need it: 1"
    )


class Counting(Workload):
    """Counts how often it is asked what a task needs."""

    def dependencies(self, task):
        self.asked.append(task)
        return super().dependencies(task)


def test_no_task_is_looked_at_twice():
    plan = Plan.symmetric(6, range(6))
    work = Counting(plan.slots, 20)
    object.__setattr__(work, "asked", [])
    simulate(round_robin(work, 4), uniform_costs(plan), work=work)
    assert sorted(work.asked) == sorted(work.tasks)


def test_memory_grows_with_the_tasks_and_no_faster():
    def peak(num_workers):
        slots = [("F", stage) for stage in range(num_workers)]
        work = Workload(slots, num_workers)
        schedule = round_robin(work, num_workers)
        tracemalloc.start()
        simulate(schedule, dict.fromkeys(slots, StageCost(1)), work=work)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    assert peak(80) < 1.3 * 4 * peak(40)
