"""The roofline command: its table at any width, its JSON, and what it refuses."""

import json
import math

import pytest

from rpfunc.cli import main
from rpfunc.cli.roofline import roofline_record
from rpfunc.plan import DECODERS, Roofline, decoder_roofline, decoder_shape, machine
from rpfunc.plan.presets import ACCELERATORS


def test_every_model_and_hardware_has_a_line(capsys):
    assert main(["roofline", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rooflines"]
    pairs = [(row["model"], row["hardware"]) for row in found]
    assert pairs == [(shape.name, kind.name) for shape in DECODERS for kind in ACCELERATORS]
    for row in found:
        line = decoder_roofline(decoder_shape(row["model"]), machine(row["hardware"]))
        assert [row["forward"], row["fused"], row["backward"]] == list(line)
        assert row["microbatch"] * 16 >= row["run"] > (row["microbatch"] - 1) * 16


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_number_is_cut_at_any_width(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["roofline", "--model", "qwen3-235b-a22b", "--hardware", "h100,2x4090", "--microbatches", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    for name, figures in (("h100", "74 2 23 19"), ("2x4090", "22 1 7 6")):
        own = [line for line in lines if f"qwen3-235b-a22b, {name} " in line]
        assert " ".join(cell for line in own for cell in line.replace("│", " ").split()[2:]) == figures


def test_what_never_hides_is_null_in_json():
    record = roofline_record(Roofline(forward=math.inf, fused=1, backward=3), 2)
    assert record == {"forward": None, "fused": 1, "backward": 3, "run": None, "microbatch": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt-9"), "there is none named 'gpt-9', there are qwen3-1.7b"),
        (("--hardware", "h100,5090"), "there is no '5090', there are 4090"),
        (("--rows", "0", "--microbatches", "0"), "roofline: 2 problems - microbatches is 0"),
    ],
)
def test_what_cannot_be_is_named(capsys, arguments, message):
    assert main(["roofline", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
