"""Torch's CSV files: what is written loads back, what is implied is left out, what is no action is named."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpfunc.errors import ScheduleError
from rpfunc.schedule import Schedule, dump_csv, load_csv
from rpfunc.testing import strategies


@given(strategies.schedules())
def test_what_is_written_loads_back(schedule):
    without = Schedule(tuple(tuple(task for task in tasks if task.kind != "X") for tasks in schedule.workers))
    assert load_csv(dump_csv(without)) == without


@given(strategies.schedules(), st.data())
def test_bubbles_and_what_is_implied_change_nothing(schedule, data):
    schedule = Schedule(tuple(tuple(task for task in tasks if task.kind != "X") for tasks in schedule.workers))
    ignored = st.sampled_from(
        ["", " ", "1UNSHARD", "0RESHARD", "2REDUCE_GRAD", "0SEND_F1", "1RECV_F1", "1SEND_B0", "0RECV_B10"]
    )
    rows = [
        [cell for task in tasks for cell in (*data.draw(st.lists(ignored, max_size=3)), str(task))]
        + data.draw(st.lists(ignored, max_size=2))
        for tasks in schedule.workers
    ]
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    assert load_csv("".join(",".join(row) + end for row in rows)) == schedule


def test_a_file_loads_as_its_text(tmp_path):
    text = "0F0,,0B0\n\n"
    (tmp_path / "schedule.csv").write_text(text)
    assert load_csv(tmp_path / "schedule.csv") == load_csv(text) == Schedule.parse("0F0 0B0\n\n")


def test_overlapped_tasks_become_two():
    assert load_csv("(0F1;3B0)OVERLAP_F_B,0I1") == Schedule.parse("0F1 3B0 0I1")


NO_ACTION = [
    "F0", "0F", "0X0", "0Z0", "-1F0", "0F0x", "0F0 0F1", "0SEND_F", "0SEND_W1", "1UNSHARD2", "(0F1;3B0)",
    "()OVERLAP_F_B", "(0F1;1UNSHARD)OVERLAP_F_B",
]  # fmt: skip


@pytest.mark.parametrize("cell", NO_ACTION)
def test_what_is_no_action_is_named_with_its_place(cell):
    with pytest.raises(ScheduleError) as caught:
        load_csv(f"0F0,0F1\n,1F0,{cell}\n")
    assert str(caught.value) == (
        f"schedule: row 2, cell 3: {cell!r} is no action of torch.distributed.pipelining, "
        "needs one such as 2F0 or 3SEND_F1"
    )


def test_all_faults_are_listed():
    with pytest.raises(ScheduleError) as caught:
        load_csv("a,0F0\n0F1,b\n")
    assert re.findall(r"row (\d), cell (\d): '(.)'", str(caught.value)) == [("1", "1", "a"), ("2", "2", "b")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "schedule: has no worker, needs at least one"),
        ('0F0,"0B0', "torch CSV: unexpected end of data"),
    ],
)
def test_text_that_is_no_file_of_rows_is_refused(text, message):
    with pytest.raises(ScheduleError) as caught:
        load_csv(text)
    assert str(caught.value) == message


def test_fused_tasks_are_not_written():
    with pytest.raises(ScheduleError) as caught:
        dump_csv(Schedule.parse("0F0 1X0 2X0"))
    assert str(caught.value) == (
        "torch CSV: has fused tasks (X) of stage 1, 2, which torch.distributed.pipelining does not know; "
        "a plan without a fused stage, as Plan.symmetric has it, would do"
    )
