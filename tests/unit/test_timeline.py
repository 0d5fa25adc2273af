import json
import re
import sys
from fractions import Fraction
from itertools import pairwise

import matplotlib
import pytest

from rpfunc import value_and_grad
from rpfunc.schedule import Event, Task, Timeline, draw
from rpfunc.schedule.timeline import HOST, every_second_stage
from rpfunc.testing import exact


def event(worker, text, start_s, end_s):
    return Event(worker, "compute", Task.parse(text), start_s, end_s)


TIMELINE = Timeline((event(0, "0F0", 10.0, 11.0), event(1, "1X0", 11.0, 13.0), event(0, "0B0", 13.0, 14.0)), 2)

BUSY = Timeline(
    (
        Event(0, "compute", Task(0, "F", 0), Fraction(2), Fraction(3)),
        Event(0, "activation_download", Task(0, "F", 0), Fraction(3), Fraction(4)),
        Event(0, "parameter_upload", Task(0, "F", 0), Fraction(0), Fraction(2)),
        Event(HOST, "update", Task(0, "F", 0), Fraction(4), Fraction(9)),
    ),
    2,
)


def test_the_makespan_is_from_first_start_to_last_end():
    assert TIMELINE.makespan_s == 4.0


def test_the_bubble_is_the_share_of_idle_time():
    assert TIMELINE.bubble == 1 - 4.0 / 8.0


def test_workers_that_are_always_busy_have_no_bubble():
    assert Timeline((event(0, "0F0", 0, 2), event(1, "1X0", 0, 2)), 2).bubble == 0.0


def test_idle_workers_count():
    assert Timeline((event(0, "0X0", 0, 1),), 4).bubble == 0.75


def test_a_timeline_without_events_has_neither_length_nor_bubble():
    assert (Timeline((), 3).makespan_s, Timeline((), 3).bubble) == (0.0, 0.0)


def test_the_chrome_trace_loads_and_holds_every_task():
    trace = json.loads(TIMELINE.chrome_trace())
    names = [entry for entry in trace["traceEvents"] if entry["name"] == "thread_name"]
    spans = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    assert [entry["args"]["name"] for entry in names] == ["worker 0", "worker 1"]
    assert [(entry["name"], entry["tid"], entry["ts"], entry["dur"]) for entry in spans] == [
        ("0F0", 0, 0.0, 1e6), ("1X0", 1, 1e6, 2e6), ("0B0", 0, 3e6, 1e6),
    ]  # fmt: skip
    assert spans[0]["args"] == {"stage": 0, "kind": "F", "microbatch": 0}


def test_the_chrome_trace_has_a_track_for_each_channel_in_order():
    trace = json.loads(BUSY.chrome_trace())
    named = {entry["tid"]: entry["args"]["name"] for entry in trace["traceEvents"] if entry["name"] == "thread_name"}
    order = {
        entry["tid"]: entry["args"]["sort_index"] for entry in trace["traceEvents"] if "sort_index" in entry["name"]
    }
    assert [named[tid] for tid in sorted(order, key=order.__getitem__)] == [
        "worker 0", "worker 0 activation download", "worker 0 parameter upload", "worker 1", "host update",
    ]  # fmt: skip
    spans = {(named[entry["tid"]], entry["name"]) for entry in trace["traceEvents"] if entry["ph"] == "X"}
    assert spans == {
        ("worker 0 parameter upload", "0F0"), ("worker 0", "0F0"), ("worker 0 activation download", "0F0"),
        ("host update", "0F0"),
    }  # fmt: skip


def test_the_bubble_counts_computation_in_the_time_of_the_workers():
    assert BUSY.window_s == (0, 4)
    assert BUSY.makespan_s == 9
    assert BUSY.bubble == Fraction(7, 8)


def test_a_run_reports_every_task_once_on_one_clock():
    result, _ = value_and_grad(exact.model(), exact.linear(), workers=2, microbatches=3)(
        exact.init(), exact.batch(3, 2)
    )
    events = result.timeline.events
    assert len({event.task for event in events}) == len(events)
    assert all(event.start_s <= event.end_s for event in events)
    assert 0.0 <= result.timeline.bubble < 1.0
    for worker in range(2):
        own = [event for event in events if event.worker == worker]
        assert all(before.end_s <= after.start_s for before, after in pairwise(own))


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("timeline", [TIMELINE, BUSY, Timeline((), 2)])
def test_a_timeline_is_drawn_to_a_file(tmp_path, suffix, timeline):
    path = tmp_path / f"timeline.{suffix}"
    draw(timeline, path, "title")
    assert path.read_bytes()[:4] == {"png": b"\x89PNG", "svg": b"<?xm"}[suffix]


@pytest.mark.parametrize(
    ("timeline", "unit", "shown", "hidden"),
    [
        (TIMELINE, None, ["0F0", "1X0", "forward", "fused", "worker 1", "time (s)"], ["activations", "host", "down"]),
        (BUSY, "layers", ["activations", "parameters", "update", "host", "up", "down", "time (layers)"], ["gradients"]),
    ],
)
def test_a_picture_names_what_it_shows(tmp_path, monkeypatch, timeline, unit, shown, hidden):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # letters stay letters
    path = tmp_path / "timeline.svg"
    draw(timeline, path, unit=unit)
    text = path.read_text()
    assert [word for word in shown if f">{word}<" not in text] == []
    assert [word for word in hidden if f">{word}<" in text] == []


@pytest.mark.parametrize(("length", "unit"), [(160.0, "s"), (0.25, "ms"), (2e-5, "µs")])
def test_the_unit_of_time_suits_the_length(tmp_path, monkeypatch, length, unit):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    draw(Timeline((event(0, "0X0", 7.0, 7.0 + length),), 1), tmp_path / "timeline.svg", "title")
    text = (tmp_path / "timeline.svg").read_text()
    assert f">time ({unit})<" in text
    assert max(float(number) for number in re.findall(r">([0-9.]+)</text>", text)) <= 250


@pytest.mark.parametrize("num_workers", [2, 16, 64])
def test_every_worker_is_named_in_a_picture_of_bounded_size(tmp_path, monkeypatch, num_workers):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    draw(Timeline(tuple(event(n, f"{n}F0", n, n + 1) for n in range(num_workers)), num_workers), tmp_path / "t.svg")
    text = (tmp_path / "t.svg").read_text()
    assert all(f">worker {n}<" in text for n in range(num_workers))
    assert float(re.search(r'height="([0-9.]+)pt"', text)[1]) <= 72 * 16


def test_drawing_leaves_pyplot_and_its_windows_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would raise
    draw(TIMELINE, tmp_path / "timeline.png")


def test_the_shade_changes_where_a_worker_goes_on_to_another_stage():
    order = ["0F0", "0F1", "3F0", "3F1", "3B0", "5F0", "0B0"]
    timeline = Timeline(tuple(event(0, text, at, at + 1) for at, text in enumerate(order)), 1)
    assert {str(task) for task in every_second_stage(timeline)} == {"3F0", "3F1", "0B0"}
