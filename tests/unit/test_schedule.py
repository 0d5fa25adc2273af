import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Plan
from rpfunc.errors import ScheduleError
from rpfunc.schedule import Schedule, Task, Workload, round_robin, validate
from rpfunc.testing import strategies

PLAN = Plan.parse("F0:2 X2:3 B0:1 B1:2")

NEEDED = "needs stage, kind (one of F, B, I, W, X) and microbatch, as in '2F0'; numbers have at most 18 digits"
NO_TASK = "is no task, needs one such as Task(2, 'F', 0), numbers below 10**18"


@given(strategies.tasks())
def test_a_task_prints_and_parses_back(task):
    assert Task.parse(str(task)) == task


@given(strategies.schedules())
def test_a_schedule_prints_and_parses_back(schedule):
    assert Schedule.parse(str(schedule)) == schedule


@given(strategies.schedules())
def test_a_file_may_end_its_last_line(schedule):
    text = str(schedule)
    assert Schedule.parse(text if text.endswith("\n") else text + "\n") == schedule
    assert Schedule.parse(text.replace("\n", "\r\n")) == schedule


@pytest.mark.parametrize(
    ("text", "num_workers"), [("0F0\n", 1), ("0F0\n\n", 2), ("\n0F0", 2), ("\n", 1), ("", 1), ("\n\n", 2)]
)
def test_an_empty_line_is_an_idle_worker(text, num_workers):
    assert len(Schedule.parse(text).workers) == num_workers
    assert Schedule.parse(str(Schedule.parse(text))) == Schedule.parse(text)


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


@pytest.mark.parametrize("text", ["", "F0", "0F", "0Z0", "-1F0", "0F0 0F1", "0F٣", "0F" + "9" * 19])
def test_text_that_is_no_task_is_refused(text):
    with pytest.raises(ScheduleError) as caught:
        Task.parse(text)
    assert str(caught.value) == f"task {text!r}: {NEEDED}"


def test_text_that_is_no_schedule_is_refused_with_line_and_word():
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse("0F0 0F1\n\n0B0 0b1\n1X")
    assert str(caught.value) == (
        f"schedule: 2 problems\n  - line 3, word 2: task '0b1': {NEEDED}\n  - line 4, word 1: task '1X': {NEEDED}"
    )


def test_text_full_of_faults_gives_a_short_message():
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse("\n".join(["0F0,0F1" * 100] * 1000))
    lines = str(caught.value).split("\n")
    assert (lines[0], lines[-1], len(lines)) == ("schedule: 1000 problems", "  - and 992 more", 10)
    assert max(map(len, lines)) < 200


TASK = Task(0, "F", 0)


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (
            ((TASK, "0F1"), (("0", "F", 2), TASK)),
            "schedule: 2 problems\n"
            f"  - worker 0, place 1: '0F1' {NO_TASK}\n"
            f"  - worker 1, place 0: ('0', 'F', 2) {NO_TASK}",
        ),
        *(
            (((task,),), f"schedule: worker 0, place 0: {task!r} {NO_TASK}")
            for task in (Task(-1, "F", 0), Task(0, "Q", 0), Task(0, "FB", 0), Task(0, "F", 0.5), Task(True, "F", 0))
        ),
        (((TASK,), [TASK]), "schedule: worker 1 is of type list, needs a tuple of tasks"),
        ((TASK, TASK), "schedule: 2 problems\n"
            "  - worker 0 is of type Task, needs a tuple of tasks\n"
            "  - worker 1 is of type Task, needs a tuple of tasks"),
        ([(TASK,)], "schedule: workers is of type list, needs a tuple with a tuple of tasks for each worker"),
        ("0F0", "schedule: workers is of type str, needs a tuple with a tuple of tasks for each worker"),
        ((), "schedule: has no worker, needs at least one"),
    ],
)  # fmt: skip
def test_a_schedule_of_something_else_than_tasks_is_refused(workers, message):
    with pytest.raises(ScheduleError) as caught:
        Schedule(workers)
    assert str(caught.value) == message


def test_round_robin_refuses_numbers_below_1():
    with pytest.raises(ScheduleError, match="round_robin: num_workers is 0, it must be at least 1"):
        round_robin(Workload(PLAN.slots, 1), 0)
    with pytest.raises(ScheduleError, match="workload: num_microbatches is 0, it must be at least 1"):
        Workload(PLAN.slots, 0)


@pytest.mark.parametrize("stage", [0, 10**18 - 1, 10**18, 10**5000], ids=["0", "most", "more", "far more"])
def test_what_can_be_made_can_be_read_again(stage):
    """Or cannot be made."""
    tasks = ((Task(stage, "F", 0), Task(0, "F", stage)),)
    if stage < 10**18:
        assert Schedule.parse(str(Schedule(tasks))).workers == tasks
    else:
        with pytest.raises(ScheduleError, match=r"place 1: .* is no task, needs .* numbers below 10\*\*18"):
            Schedule(tasks)


def test_a_stage_that_is_forward_and_fused_is_refused_with_all_else():
    with pytest.raises(ScheduleError) as caught:
        Workload([("F", 0), ("X", 0), ("F", 1), ("F", 1), ("X", 1)], 2)
    assert str(caught.value) == (
        "workload: 3 problems\n"
        "  - slot 3 is ('F', 1), which is there already\n"
        "  - stage 0 is both forward and fused, it can be one of them\n"
        "  - stage 1 is both forward and fused, it can be one of them"
    )
    with pytest.raises(ScheduleError, match="stage 0 is both forward and fused"):
        Workload.of(Schedule.parse("0F0 0X0"))
