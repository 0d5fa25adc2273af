import json
import sys
from itertools import pairwise

import pytest

from rpfunc import value_and_grad
from rpfunc.schedule import Event, Task, Timeline, draw
from rpfunc.testing import exact


def event(worker, text, start_s, end_s):
    return Event(worker, "compute", Task.parse(text), start_s, end_s)


TIMELINE = Timeline((event(0, "0F0", 10.0, 11.0), event(1, "1X0", 11.0, 13.0), event(0, "0B0", 13.0, 14.0)), 2)


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
    names = [entry for entry in trace["traceEvents"] if entry["ph"] == "M"]
    spans = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    assert [entry["args"]["name"] for entry in names] == ["worker 0", "worker 1"]
    assert [(entry["name"], entry["tid"], entry["ts"], entry["dur"]) for entry in spans] == [
        ("0F0", 0, 0.0, 1e6), ("1X0", 1, 1e6, 2e6), ("0B0", 0, 3e6, 1e6),
    ]  # fmt: skip
    assert spans[0]["args"] == {"stage": 0, "kind": "F", "microbatch": 0}


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
def test_a_timeline_is_drawn_to_a_file(tmp_path, suffix):
    path = tmp_path / f"timeline.{suffix}"
    draw(TIMELINE, path, "title")
    assert path.read_bytes()[:4] == {"png": b"\x89PNG", "svg": b"<?xm"}[suffix]


def test_drawing_leaves_pyplot_and_its_windows_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would raise
    draw(TIMELINE, tmp_path / "timeline.png")
