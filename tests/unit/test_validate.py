import re

import pytest
from broken_schedule import ONE, TURN, TWO, work
from broken_schedules import BROKEN

from rpfunc.errors import ScheduleError
from rpfunc.plan import StageCost
from rpfunc.schedule import Schedule, Task, Workload, round_robin, simulate, validate
from rpfunc.schedule.grid import grid
from rpfunc.schedule.validate import halved_as

ANY_COSTS = {(kind, 0): StageCost(1) for kind in "FXBIW"}


def refused(schedule, work, **options):
    with pytest.raises(ScheduleError) as caught:
        validate(schedule, work, **options)
    return str(caught.value)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_schedule_is_refused(broken):
    assert refused(broken.schedule, broken.work, **broken.options) == broken.message


def test_every_broken_schedule_has_its_own_message():
    assert len({broken.message for broken in BROKEN}) == len(BROKEN) >= 15


@pytest.mark.parametrize(
    ("text", "work", "options"),
    [
        ("0F1 0F0 1X0 1X1\n1B0 1B1 0B0 0B1", work(TURN, 2), {}),
        ("0F0 1X0 1B0 0B0\n0F1 1X1 1B1 0B1", work(TURN, 2), {}),
        ("\n0F0 0B0\n\n", work(ONE, 1), {"bound": True, "in_flight": 1}),
        ("0F0 0F1 0I0 0B1\n0W0", work(ONE, 2), {}),
        ("0F0 0F1 0B0 0I1 0W1", work(ONE, 2, halved=frozenset([(0, 1)])), {}),
        ("0X1 0X0", work("X0:3", 2, num_blocks=2), {}),
        ("0F0 0B0 0F1 0B1", work(ONE, 1, num_iterations=2), {}),
        ("0F0 0F1 0B0 0B1 0F2 0B2", work(ONE, 1, num_iterations=3, staleness=1), {}),
        ("0F1 0F0", Workload([("F", 0)], 1, num_iterations=2), {}),
        ("0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2", work(TWO, 3), {"bound": True, "in_flight": 2}),
        ("0F0 0F1 0F2 1X0 1X1 1X2\n0B0 0B1 0B2", work("F0:1 X1:2 B0:1", 3), {"in_flight": 1}),
    ],
    ids=[
        "forward passes in any order", "a stage on two workers", "workers without work", "the schedule halves",
        "the work halves", "blocks are independent", "iterations follow each other", "one step stale",
        "nothing is trained", "bound and within memory", "nothing is held where the backward is elsewhere",
    ],
)  # fmt: skip
def test_a_schedule_that_works_is_accepted(text, work, options):
    validate(Schedule.parse(text), work, **options)


def test_a_deadlock_across_workers_is_refused_as_torch_does_not():
    """torch.distributed.pipelining's own validation accepts it: each rank's order alone is right."""
    schedule = Schedule.parse("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1")
    assert "deadlock: worker 0 waits at 0B0 for 1B0" in refused(schedule, work(TWO, 2))


def test_a_stage_on_two_workers_is_accepted_as_torch_does_not():
    """torch.distributed.pipelining refuses it, though round-robin dispatch is built on it."""
    validate(Schedule.parse("0F0 1F0 1B0 0B0\n0F1 1F1 1B1 0B1"), work(TWO, 2))


def test_what_the_schedule_halves_becomes_the_work():
    plain = work(ONE, 2)
    schedule = Schedule.parse("0F0 0F1 0I0 0B1 0W0")
    halved = halved_as(schedule, plain)
    assert halved.halved == {(0, 0)}
    assert sorted(halved.tasks) == sorted(schedule.tasks)
    assert halved_as(schedule, halved) is halved
    assert halved_as(Schedule.parse("0F0 0B0"), plain) is plain


def test_in_flight_has_to_leave_room_for_one():
    with pytest.raises(ScheduleError, match=re.escape("validate: in_flight is 0, it must be at least 1")):
        validate(Schedule.parse("0F0 0B0"), work(ONE, 1), in_flight=0)


def test_a_large_schedule_shows_what_matters():
    right = round_robin(work(TWO, 100), 40)
    lines = [list(tasks) for tasks in right.workers]
    lines[2][50], lines[2][60] = lines[2][60], lines[2][50]
    assert refused(Schedule(tuple(map(tuple, lines))), work(TWO, 100)) == (
        "schedule: 2 problems\n"
        "  - worker 2 has 1B60 (place 50) before 1B59 (place 59): gradients are summed in microbatch order\n"
        "  - worker 2 has 1B51 (place 51) before 1B50 (place 60): gradients are summed in microbatch order\n"
        "worker 2:  ...    1B48   1B49  >1B60< >1B51<  1B52   1B53   ...    1B57   1B58  >1B59< >1B50<"
        "  1B61   1B62   ..."
    )


def test_a_message_stays_short_whatever_is_wrong():
    wanted = work(TWO, 1000)
    schedule = Schedule(tuple(tasks[::-1] + tasks[:1] for tasks in round_robin(wanted, 40).workers if tasks))
    lines = refused(schedule, wanted, bound=True, in_flight=1).split("\n")
    assert lines[0] == "schedule: 2004 problems"
    assert sum(line.startswith("  - ") for line in lines) <= 5 * (8 + 1)
    assert sum(line.startswith("worker ") for line in lines) <= 12
    assert max(map(len, lines)) < 200


def test_a_number_that_is_far_off_is_refused_at_once():
    """Nothing is made for each task that is missing: there may be more than fit into memory."""
    far = Workload([("F", 0), ("B", 0)], num_microbatches=10**15, num_iterations=10**6)
    message = refused(Schedule.parse("0F0 0B0"), far)
    assert message == (
        "schedule: 2 problems\n"
        f"  - 0F1 to 0F{10**21 - 1} are missing\n"
        f"  - 0B1 to 0B{10**21 - 1} are missing\n"
        "worker 0: >0F0< >0B0<"
    )


@pytest.mark.parametrize("text", ["0F0 0I{0} 0W{0}", "0F0 0B{0}", "0X{0}", "0F{0}"])
@pytest.mark.parametrize("refuse", [validate, lambda schedule, work: simulate(schedule, ANY_COSTS)])
def test_a_microbatch_that_is_far_off_is_refused_at_once(text, refuse):
    """Whatever reads the schedule: nothing is made for each microbatch before."""
    schedule = Schedule.parse(text.format(10**15))
    with pytest.raises(ScheduleError, match="missing"):
        refuse(schedule, Workload.of(schedule))


def test_a_gap_in_a_large_schedule_is_shown_where_it_is():
    wanted = work(TWO, 100)
    lines = [list(tasks) for tasks in round_robin(wanted, 40).workers]
    del lines[2][50:60]
    assert refused(Schedule(tuple(map(tuple, lines))), wanted) == (
        "schedule: 1B50 to 1B59 are missing\nworker 2:  ...    1B47   1B48  >1B49< >1B60<  1B61   1B62   ..."
    )


@pytest.mark.parametrize("num_workers", [1, 7, 300])
def test_the_cost_grows_with_the_tasks_alone(num_workers, monkeypatch):
    """A task's needs are looked up at most once for each need, and twice more where something is wrong."""
    asked = []
    dependencies = Workload.dependencies
    monkeypatch.setattr(Workload, "dependencies", lambda self, task: asked.append(task) or dependencies(self, task))
    stages = [(kind, stage) for kind, order in (("F", 1), ("B", -1)) for stage in list(range(30))[::order]]
    wanted = Workload(stages, 20)
    right = round_robin(wanted, num_workers)
    validate(right, wanted)
    assert len(asked) <= 3 * len(right.tasks)
    ring = [[Task(1, "F", m), Task(0, "F", (m + 1) % 300)] for m in range(300)]
    backward = [Task(stage, "B", m) for m in range(300) for stage in (1, 0)]
    asked.clear()
    assert "and so on over 292 more" in refused(
        Schedule((*map(tuple, ring), tuple(backward))), Workload([("F", 0), ("F", 1), ("B", 1), ("B", 0)], 300)
    )
    assert len(asked) <= 5 * 1200


def test_the_grid_of_a_small_schedule_is_whole():
    schedule = Schedule.parse("0F0 10F0\n\n0B0")
    assert grid(schedule, []) == "worker 0:  0F0    10F0\nworker 1:\nworker 2:  0B0"
    assert grid(schedule, [(0, 1)]) == "worker 0:  0F0   >10F0<\nworker 1:\nworker 2:  0B0"


def test_the_grid_of_a_large_schedule_is_cut_to_the_marks():
    long = Schedule.parse(" ".join(f"0F{m}" for m in range(20)) + "\n0B0")
    assert grid(long, []) == ""
    assert grid(long, [(0, 0)]) == "worker 0: >0F0<  0F1   0F2   ..."
    assert grid(long, [(0, 19), (1, 0)]) == "worker 0:  ...    0F17   0F18  >0F19<\nworker 1: >0B0<"
    many = Schedule(((Task(0, "F", 0),),) * 101)
    assert grid(many, [(7, 0), (100, 0)]) == "worker   7: >0F0<\nworker 100: >0F0<"
    assert len(grid(many, [(worker, 0) for worker in range(101)]).split("\n")) == 12
