import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.style import Style

from rpfunc import Plan, State, optim, train_steps
from rpfunc.errors import OptionsError
from rpfunc.plan.costs import StageCost, uniform_costs
from rpfunc.plan.hardware import Hardware
from rpfunc.schedule import Event, Schedule, Task, Timeline, Workload, round_robin, simulate
from rpfunc.schedule.gantt import gantt
from rpfunc.schedule.timeline import HOST
from rpfunc.testing import exact

COSTS = {("F", 0): StageCost(1), ("X", 1): StageCost(2), ("B", 0): StageCost(3)}
SMALL = simulate(Schedule.parse("0F0 0F1 0B0 0B1\n1X0 1X1"), COSTS)


def test_a_chart_has_a_line_a_worker_a_scale_and_a_legend():
    assert str(gantt(SMALL, 45)) == (
        "worker 0 FFFFFFFF....BBBBBBBBBBBBBBBBBBBBBBBB\n"
        "worker 1 ....XXXXXXXXXXXXXXXX................\n"
        "         0            idle 33.3%            9\n"
        "F forward, X fused, B backward, . idle"
    )


def test_case_changes_where_a_worker_goes_on_to_another_stage():
    work = Workload([("F", 0), ("F", 1), ("X", 2)], 2)
    timeline = simulate(round_robin(work, 1), {slot: StageCost(1) for slot in work.slots}, work=work)
    assert str(gantt(timeline, 45)).splitlines()[0] == f"worker 0 {'F' * 12}{'f' * 12}{'X' * 12}"


def test_a_column_shows_what_fills_most_of_it():
    tasks = [(0, "F", 0.0, 0.4), (0, "B", 0.4, 1.0), (0, "F", 1.0, 1.2), (0, "F", 1.6, 2.0), (0, "F", 2.0, 2.4)]
    tasks.append((0, "F", 30.6, 31.0))
    events = tuple(Event(0, "compute", Task(stage, kind, m), *at) for m, (stage, kind, *at) in enumerate(tasks))
    row = str(gantt(Timeline(events, 1), 40)).splitlines()[0]
    assert row == f"worker 0 BF{'.' * 29}"


def test_transfers_leave_their_time_blank():
    costs = {("X", 0): StageCost(6, parameter_bytes=6, gradient_bytes=24)}
    timeline = simulate(Schedule.parse("0X0"), costs, Hardware(upload=1, download=1))
    assert str(gantt(timeline, 45)) == (
        f"worker 0 {'.' * 6}{'X' * 6}{'.' * 24}\n         0            idle 83.3%           36\nX fused, . idle"
    )


def test_updates_have_a_line_of_the_host():
    costs = {("X", 0): StageCost(6, gradient_bytes=6)}
    timeline = simulate(Schedule.parse("0X0"), costs, Hardware(upload=1, download=1, update=24))
    assert str(gantt(timeline, 45)) == (
        f"worker 0 {'X' * 6}{'.' * 30}\n"
        f"host     {'.' * 12}{'U' * 24}\n"
        "         0            idle 50.0%           36\n"  # of the worker's time, which the update is no part of
        "X fused, U update, . idle"
    )


def test_an_update_before_the_first_task_is_where_time_begins():
    """As in the timelines of training: the update of the step before, and then the iteration."""
    task = Task(0, "X", 0)
    events = Event(HOST, "update", task, 50.0, 59.0), Event(0, "compute", task, 59.0, 86.0)
    lines = str(gantt(Timeline(events, 1), 45)).splitlines()
    assert lines[:2] == [f"worker 0 {'.' * 9}{'X' * 27}", f"host     {'U' * 9}{'.' * 27}"]
    assert lines[2].split() == ["0", "idle", "0.0%", "36"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_timeline_of_a_training_step_shows_its_update(asynchronous):
    optimizer = optim.adamw(1e-2)
    batches = [exact.batch(3, 2)] * 3
    steps = train_steps(
        State.create(exact.init(), optimizer), batches, model=exact.model(), objective=exact.linear(),
        optimizer=optimizer, workers=2, microbatches=3, asynchronous=asynchronous,
    )  # fmt: skip
    names = [[line.split()[0] for line in str(gantt(result.timeline)).splitlines()[:3]] for _, result in steps]
    assert names[-1] == ["worker", "worker", "host"]


def test_updates_that_take_no_time_have_no_line():
    work = Workload([("F", 0), ("X", 1)], 2)
    timeline = simulate(round_robin(work, 1), {slot: StageCost(1) for slot in work.slots}, work=work)
    assert any(event.worker == HOST for event in timeline.events)
    assert "host" not in str(gantt(timeline))


@settings(max_examples=15)
@given(st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 9), st.integers(40, 120))
def test_the_legend_names_every_letter_that_is_drawn(layers, num_workers, is_halved, update, width):
    plan = Plan.symmetric(layers, range(layers))
    halved = frozenset((stage, m) for stage in range(0, layers, 2) for m in range(4)) if is_halved else frozenset()
    work = Workload(plan.slots, 4, halved=halved)
    timeline = simulate(greedy_halves(work, num_workers), uniform_costs(plan), Hardware(update=update), work=work)
    lines = str(gantt(timeline, width)).splitlines()
    scale = next(index for index, line in enumerate(lines) if " idle " in line and "%" in line)
    drawn = set("".join(line.split()[-1] for line in lines[:scale]))
    legend = " ".join(lines[scale + 1 :])
    named, _, case = legend.partition("; ")
    letters = {letter for entry in named.split(", ") for letter in entry.split()[0].split("/")}
    assert letters == drawn
    assert (case == "lower case: every second stage") == any(map(str.islower, drawn))


@pytest.mark.parametrize("num_workers", [1, 8, 12])
def test_no_line_is_wider_than_asked(num_workers):
    plan = Plan.symmetric(12, range(12))
    work = Workload(plan.slots, 8, halved=frozenset((stage, m) for stage in range(0, 12, 2) for m in range(8)))
    timeline = simulate(greedy_halves(work, num_workers), uniform_costs(plan), work=work)
    for width in (40, 80, 133):
        lines = str(gantt(timeline, width)).splitlines()
        assert max(map(len, lines)) <= width
        assert {len(line) for line in lines[: num_workers + 1]} == {width}
        assert [line.split()[1] for line in lines[:num_workers]] == list(map(str, range(num_workers)))


def greedy_halves(work, num_workers):
    """All tasks in order of their slots, slots dealt in turn."""
    workers = [[] for _ in range(num_workers)]
    for place, (kind, stage) in enumerate(work.slots):
        own = [task for task in work.tasks if task.stage == stage and ("F" if task.kind == "F" else "B") == kind]
        workers[place % num_workers] += sorted(own, key=lambda task: (task.microbatch, task.kind))
    return Schedule(tuple(map(tuple, workers)))


def test_time_begins_with_the_first_task():
    """A real run's clock starts anywhere."""
    late = tuple(event._replace(start_s=event.start_s + 98765.5, end_s=event.end_s + 98765.5) for event in SMALL.events)
    assert str(gantt(Timeline(late, 2), 45)) == str(gantt(SMALL, 45))


def test_kinds_have_colours_for_rich():
    spans = {str(gantt(SMALL, 45))[span.start : span.end]: span.style for span in gantt(SMALL, 45).spans}
    assert len({spans[letters] for letters in ("F" * 8, "B" * 24, "X" * 16, "." * 4)}) == 4
    assert all(Style.parse(style) for style in spans.values())


def test_a_timeline_without_events_is_idle():
    assert str(gantt(Timeline((), 1), 40)).splitlines()[0] == f"worker 0 {'.' * 31}"


def test_too_narrow_a_chart_is_refused():
    with pytest.raises(OptionsError) as caught:
        gantt(SMALL, 39)
    assert str(caught.value) == "gantt: width is 39, it must be at least 40"
