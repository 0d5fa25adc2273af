import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Plan
from rpfunc.errors import ScheduleError
from rpfunc.schedule import Schedule, Task, Workload, round_robin, validate
from rpfunc.testing import strategies

PLAN = Plan.parse("F0:2 X2:3 B0:1 B1:2")


@given(strategies.tasks())
def test_a_task_prints_and_parses_back(task):
    assert Task.parse(str(task)) == task


@given(strategies.schedules())
def test_a_schedule_prints_and_parses_back(schedule):
    assert Schedule.parse(str(schedule)) == schedule


@given(st.data(), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_round_robin_deals_slots_like_cards(data, num_layers, num_workers, num_microbatches):
    plan, start = data.draw(strategies.plans(num_layers)), data.draw(st.integers(0, 20))
    schedule = round_robin(Workload(plan.slots, num_microbatches), num_workers, start)
    validate(schedule, Workload(plan.slots, num_microbatches))
    assert len(schedule.workers) == num_workers
    for slot, (kind, stage) in enumerate(plan.slots):
        tasks = schedule.workers[(start + slot) % num_workers]
        wanted = [Task(stage, kind, microbatch) for microbatch in range(num_microbatches)]
        place = tasks.index(wanted[0])
        assert list(tasks[place : place + num_microbatches]) == wanted


@given(st.data(), st.integers(1, 6), st.integers(1, 5))
def test_the_next_iteration_goes_on_with_the_next_worker(data, num_layers, num_workers):
    plan, start = data.draw(strategies.plans(num_layers)), data.draw(st.integers(0, 9))
    joined = start + len(plan.slots)
    last_kind, last_stage = plan.slots[-1]
    before, after = (round_robin(Workload(plan.slots, 1), num_workers, cursor) for cursor in (start, joined))
    last = next(worker for worker, tasks in enumerate(before.workers) if Task(last_stage, last_kind, 0) in tasks)
    first_kind, first_stage = plan.slots[0]
    first = next(worker for worker, tasks in enumerate(after.workers) if Task(first_stage, first_kind, 0) in tasks)
    assert first == (last + 1) % num_workers


@given(st.data(), st.integers(1, 5), st.integers(1, 3))
def test_a_missing_and_a_repeated_task_are_both_refused(data, num_layers, num_microbatches):
    plan = data.draw(strategies.plans(num_layers))
    schedule = round_robin(Workload(plan.slots, num_microbatches), 2)
    lost = data.draw(st.sampled_from(schedule.tasks))
    without = Schedule(tuple(tuple(task for task in tasks if task != lost) for tasks in schedule.workers))
    twice = Schedule((*schedule.workers, (lost,)))
    for wrong, message in ((without, f"{lost} is missing"), (twice, f"{lost} stands 2 times")):
        with pytest.raises(ScheduleError) as caught:
            validate(wrong, Workload(plan.slots, num_microbatches))
        assert str(caught.value) == f"schedule: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0 1X0\n1B0 0B0 0B0 7F1",
            "schedule: 2 problems\n  - 7F1 is not part of the work\n  - 0B0 stands 2 times",
        ),
        (
            "1X0 0F0\n0B0 1B0",
            "schedule never ends\n"
            ">1X0< 0F0\n"
            ">0B0< 1B0: 2 problems\n"
            "  - worker 0 waits at 1X0 for 0F0\n"
            "  - worker 1 waits at 0B0 for 1B0",
        ),
        (
            "0F0 1X0\n0B0 1B0",
            "schedule never ends\n0F0 1X0\n>0B0< 1B0: worker 1 waits at 0B0 for 1B0",
        ),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(text, message):
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule.parse(text), Workload(PLAN.slots, 1))
    assert str(caught.value) == message


def test_a_schedule_that_breaks_microbatch_order_never_ends():
    """Gradients are summed in microbatch order, so that no schedule changes a bit."""
    with pytest.raises(ScheduleError, match="worker 0 waits at 0X1 for 0X0"):
        validate(Schedule.parse("0X1 0X0"), Workload(Plan.single(3).slots, 2))


def test_forward_tasks_may_run_in_any_microbatch_order():
    validate(Schedule.parse("0F1 0F0 1X0 1X1\n1B0 1B1 0B0 0B1"), Workload(PLAN.slots, 2))


def test_a_stage_may_stand_on_two_workers():
    validate(Schedule.parse("0F0 1X0 1B0 0B0\n0F1 1X1 1B1 0B1"), Workload(PLAN.slots, 2))


@pytest.mark.parametrize("text", ["", "F0", "0F", "0Z0", "-1F0", "0F0 0F1"])
def test_text_that_is_no_task_is_refused(text):
    with pytest.raises(ScheduleError) as caught:
        Task.parse(text)
    assert str(caught.value) == f"task {text!r}: needs stage, kind (one of F, B, I, W, X) and microbatch, as in '2F0'"


def test_round_robin_refuses_numbers_below_1():
    with pytest.raises(ScheduleError, match="round_robin: num_workers is 0, it must be at least 1"):
        round_robin(Workload(PLAN.slots, 1), 0)
    with pytest.raises(ScheduleError, match="workload: num_microbatches is 0, it must be at least 1"):
        Workload(PLAN.slots, 0)
