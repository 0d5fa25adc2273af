"""Pictures: nothing that happened is lost in them, and what is alike looks alike."""

import numpy as np
import pytest
from matplotlib.image import imread

from rpfunc.plan import Hardware, StageCost
from rpfunc.schedule import Event, Schedule, Task, Timeline, draw, simulate

GREEN, BLUE = (0x54, 0xA2, 0x4B), (0x4C, 0x78, 0xA8)


def marks(path, colour):
    """How many short stretches of about this colour a row of dots shows at most; the legend's are long."""
    picture = imread(path)[:, :, :3] * 255
    like = np.abs(picture - np.array(colour)).max(axis=2) < 40  # further from any grey
    ends = [np.flatnonzero(np.diff(np.pad(row, 1).astype(int))).reshape(-1, 2) for row in like]
    return max(int((np.diff(own) < 20).sum()) for own in ends)


@pytest.mark.parametrize("length", [1.0, 1.013, 1.37, 7 / 3])
@pytest.mark.parametrize("share", [0.3, 0.01, 1e-6])
def test_every_short_transfer_leaves_a_mark(tmp_path, length, share):
    schedule = Schedule.parse(" ".join(f"0F{m}" for m in range(40)) + " " + " ".join(f"0B{m}" for m in range(40)))
    costs = {("F", 0): StageCost(length, output_bytes=share), ("B", 0): StageCost(length)}
    draw(simulate(schedule, costs, Hardware(download=1)), tmp_path / "picture.png")
    assert marks(tmp_path / "picture.png", GREEN) == 40


def test_short_tasks_leave_a_mark_and_crowds_melt(tmp_path):
    apart = [Event(0, "compute", Task(0, "F", m), 10.0 * m, 10.0 * m + 1e-4) for m in range(50)]
    draw(Timeline((*apart, Event(0, "compute", Task(0, "X", 0), 500, 501)), 1), tmp_path / "apart.png")
    assert marks(tmp_path / "apart.png", BLUE) == 50
    crowd = [Event(0, "compute", Task(0, "F", m), 0.001 * m, 0.001 * m + 1e-4) for m in range(1000)]
    draw(Timeline((*crowd, Event(0, "compute", Task(0, "X", 0), 500, 501)), 1), tmp_path / "crowd.png")
    assert marks(tmp_path / "crowd.png", BLUE) == 1


def test_short_activations_are_seen_before_the_parameters_that_they_pause(tmp_path):
    loads = [Event(0, "parameter_upload", Task(0, "F", 0), m, m + 0.999) for m in range(30)]
    inputs = [Event(0, "activation_upload", Task(0, "F", m), m + 0.999, m + 1) for m in range(30)]
    draw(Timeline((*inputs, *loads), 1), tmp_path / "picture.png")
    assert marks(tmp_path / "picture.png", GREEN) == 30


@pytest.mark.parametrize("length", [1, 3, 10])
def test_boxes_that_are_alike_have_a_label_all_or_none(tmp_path, monkeypatch, length):
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
    events = [Event(0, "compute", Task(0, "F", m), m * length, (m + 1) * length) for m in range(12)]
    draw(Timeline((*events, Event(1, "compute", Task(1, "X", 0), 0, 700 / length)), 2), tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert len({f">0F{m}<" in text for m in range(12)}) == 1
