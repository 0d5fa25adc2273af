"""Commands that are stopped, or whose output nobody takes: one line at most, and no file half-written."""

import json
import resource
import sys

import pytest

from rpfunc.cli import main
from rpfunc.cli import simulate as module

SIMULATE = ("simulate", "--hardware", "2x4090", "--schedule", "gpipe", "--microbatches", "8", "--sequences", "1")


def interrupt(*_args, **_options):
    raise KeyboardInterrupt


def test_ctrl_c_is_told_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(module, "compare", interrupt)
    assert main(SIMULATE) == 130
    assert capsys.readouterr().err == "rpfunc: interrupted\n"


@pytest.mark.parametrize("arguments", [SIMULATE, ("roofline",), ("simulate", "--model", "none")])
def test_a_closed_output_is_no_fault(monkeypatch, arguments):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(arguments) in (0, 2)


@pytest.mark.parametrize(("option", "suffix"), [("--trace", ".json"), ("--plot", ".png")])
def test_a_full_disk_leaves_the_file_that_was_there(monkeypatch, capsys, tmp_path, option, suffix):
    path = tmp_path / f"kept{suffix}"
    assert main([*SIMULATE, option, str(path)]) == 0
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        assert main([*SIMULATE, option, str(path)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == f"rpfunc: {path}: File too large\n"
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]
    if option == "--trace":
        json.loads(before)
