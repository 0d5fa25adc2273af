"""The simulate command: what it prints, writes and refuses."""

import json

import pytest

from rpfunc import Plan
from rpfunc.cli import main
from rpfunc.plan.compare import SCHEDULES


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def simulate(capsys, *arguments):
    defaults = {"--hardware": "2x4090", "--microbatches": "4"}
    given = [word for name, value in defaults.items() if name not in arguments for word in (name, value)]
    status = main(["simulate", *given, *arguments])
    return status, capsys.readouterr()


def test_all_schedules_stand_in_one_table(capsys):
    status, captured = simulate(capsys)
    assert status == 0
    lines = captured.out.splitlines()
    assert "llama-3.1-8b (8.0 B parameters) on 2x4090, 4 microbatches of 1 x 2048 tokens" in lines[0]
    for name in SCHEDULES:
        assert sum(f" {name} " in line for line in lines) == 1
    assert "-0.0%" not in captured.out


def test_json_holds_what_the_table_shows(capsys):
    status, captured = simulate(capsys, "--json", "--schedule", "gpipe,round_robin", "--sequences", "3")
    assert status == 0
    record = json.loads(captured.out)
    assert record["sequences"] == 3
    rows = {row["schedule"]: row for row in record["rows_by_schedule"]}
    assert rows.keys() == {"gpipe", "round_robin"}
    for row in rows.values():
        assert row["bubble"] == pytest.approx(row["fill_drain"] + row["waits"] + row["stalls"])
        assert 0 <= row["bubble"] < 1
        assert len(row["ways"]) == len(Plan.parse(row["plan"]).slots)
        assert row["fits_memory"] == (max(row["peak_bytes"]) <= record["memory_bytes"])
    assert {row["fits_memory"] for row in rows.values()} == {True, False}
    assert record["roofline"] == {"forward": 2, "fused": 1, "backward": 1, "run": 2, "microbatch": 1}
    assert (rows["gpipe"]["steady_bubble"], rows["gpipe"]["steady_plan"]) == (None, None)
    assert len(rows["round_robin"]["steady_ways"]) == len(Plan.parse(rows["round_robin"]["steady_plan"]).slots)
    assert rows["round_robin"]["steady_bubble"] < 0.2


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_number_is_cut_at_any_width(capsys, monkeypatch, width):
    """The same figures stand in one table or in several, and the mark of memory with them."""
    monkeypatch.setenv("COLUMNS", str(width))
    names = "gpipe,one_f_one_b,looped_bfs"
    _, captured = simulate(capsys, "--schedule", names, "--rows", "4096", "--sequences", "4")
    lines = captured.out.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in captured.out
    _, record = simulate(capsys, "--schedule", names, "--rows", "4096", "--sequences", "4", "--json")
    marks = set()
    for row in json.loads(record.out)["rows_by_schedule"]:
        cells = [cell.strip() for line in lines if f" {row['schedule']} " in line for cell in line.split("│")]
        figures = [row["makespan"]] + [100 * max(0, row[part]) for part in ("bubble", "fill_drain", "waits", "stalls")]
        peak = f"{max(row['peak_bytes']) / 1e9:.1f}"
        moved = f"{(row['uploaded_bytes'] + row['downloaded_bytes']) / 1e9:.1f}"
        for cell in (f"{figures[0]:.3f}", *(f"{part:.1f}" for part in figures[1:]), moved):
            assert cell in cells
        marks.add(peak if row["fits_memory"] else f"! {peak}")
        assert marks <= {*cells} | marks - {peak, f"! {peak}"}
    assert any(mark.startswith("!") for mark in marks)


def test_schedules_that_need_more_layers_are_named(capsys):
    _, captured = simulate(capsys, "--schedule", "gpipe,zb_v", "--hardware", "20x4090")
    assert "zb_v: 34 layers are too few for a stage each" in captured.out


def test_one_schedule_is_drawn_and_written(capsys, tmp_path):
    plot, trace = tmp_path / "one.png", tmp_path / "one.json"
    status, captured = simulate(capsys, "--schedule", "one_f_one_b", "--plot", str(plot), "--trace", str(trace))
    assert status == 0
    assert "worker 1" in captured.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert {event["name"] for event in json.loads(trace.read_text())["traceEvents"]} >= {"0F0", "1B3"}


def test_several_schedules_have_their_names_in_their_files(capsys, tmp_path):
    assert simulate(capsys, "--schedule", "gpipe,greedy", "--trace", str(tmp_path / "t.json"))[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t-gpipe.json", "t-greedy.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedule", "gpip"), "there is no gpip, there are all, gpipe,"),
        (("--microbatches", "0"), "microbatches is 0, it must be at least 1"),
        (("--model", "gpt-9"), "there is none named 'gpt-9', there are qwen3-1.7b"),
        (("--hardware", "8x5090"), "there is no '5090', there are 4090"),
        (("--hardware", "40x4090", "--schedule", "gpipe"), "gpipe needs a layer for each stage"),
    ],
)
def test_what_cannot_be_is_named(capsys, arguments, message):
    status, captured = simulate(capsys, *arguments)
    assert status == 2
    assert message in " ".join(captured.err.split())
