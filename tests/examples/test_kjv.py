"""The demo, shortened: asynchronous, it learns, and it gives the same result whoever works on it."""

import json
from pathlib import Path

import pytest
from cli.tiny_runs import metrics, saved

from rpfunc.cli import main

CONFIG = Path(__file__).parents[2] / "examples" / "kjv.toml"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kjv")
    ways = {"as it is": [], "again": [], "four workers": ["--workers", "4"]}
    for name, flags in ways.items():
        short = ["--steps", "16", "--evaluate-every", "16", "--optimizer.warmup", "4", "--sample-tokens", "8"]
        assert main(["train", str(CONFIG), "--out", str(folder / name), *short, *flags]) == 0
    return {name: folder / name for name in ways}


def test_it_updates_one_step_behind_and_learns(runs):
    run = runs["as it is"]
    assert json.loads((run / "options.json").read_text())["optimizer"]["asynchronous"] is True
    assert any(name.startswith("stale.") for name in saved(run))
    held_out = [record["held_out_bits_per_byte"] for record in metrics(run) if "held_out_bits_per_byte" in record]
    assert held_out[-1] < held_out[0] - 2


@pytest.mark.parametrize("other", ["again", "four workers"])
def test_every_run_gives_the_same_result(runs, other):
    assert metrics(runs[other]) == metrics(runs["as it is"])
    assert (runs[other] / "sample.txt").read_bytes() == (runs["as it is"] / "sample.txt").read_bytes()
    assert saved(runs[other]) == saved(runs["as it is"])
