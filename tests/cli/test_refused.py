"""What the command line refuses before it computes anything: one message, exit status 2, never a traceback."""

import os
import subprocess
import sys

import pytest

from rpfunc.cli import app, main


@pytest.fixture
def never(monkeypatch):
    """Nothing may be simulated."""

    def simulated(*arguments):
        raise AssertionError("work has started")

    monkeypatch.setattr(app, "simulate_command", simulated)


def refused(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize("option", ["--plot", "--trace"])
def test_files_that_cannot_be_written_are_refused_before_work(option, never, capsys, tmp_path):
    suffix = {"--plot": ".png", "--trace": ".json"}[option]
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path / "none" / f"x{suffix}", f"there is no folder '{tmp_path}/none' for 'x{suffix}'"),
        (tmp_path / "file" / f"x{suffix}", f"there is no folder '{tmp_path}/file' for 'x{suffix}'"),
        (
            tmp_path / "folder",
            f"'{tmp_path}/folder' is a folder, it must be a file, as in '{tmp_path}/folder/timeline{suffix}'",
        ),
        ("", f"'.' is a folder, it must be a file, as in 'timeline{suffix}'"),
        (tmp_path / "x.xyz", f"'{tmp_path}/x.xyz' must end with {'.png or .svg' if suffix == '.png' else '.json'}"),
    ):
        assert refused(capsys, "simulate", option, path) == f"rpfunc: output: {option[2:]}: {message}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("exists", [True, False])
def test_files_without_permission_are_refused_before_work(exists, never, capsys, tmp_path, monkeypatch):
    target = tmp_path / "x.json"
    if exists:
        target.write_text("")
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))  # root may write anywhere
    assert refused(capsys, "simulate", "--trace", target) == f"rpfunc: output: trace: '{target}' may not be written\n"
    assert asked == [(target if exists else tmp_path, os.W_OK)]


def test_all_files_are_checked_at_once(never, capsys, tmp_path):
    message = refused(capsys, "simulate", "--plot", tmp_path, "--trace", tmp_path / "x.txt")
    assert message.startswith("rpfunc: output: 2 problems\n  - plot: ")
    assert "\n  - trace: " in message


@pytest.mark.parametrize("option", ["microbatches", "rows", "sequences"])
@pytest.mark.parametrize("digits", [20, 300, 5000])
def test_numbers_of_many_digits_are_refused(option, digits, never, capsys):
    message = refused(capsys, "simulate", f"--{option}", "9" * digits)
    assert option in message
    assert "Traceback" not in message


@pytest.mark.parametrize("number", [10**18 + 1, 2**62, 2**63 - 1])
@pytest.mark.parametrize(
    ("command", "option"),
    [("simulate", "microbatches"), ("simulate", "rows"), ("simulate", "sequences"), ("roofline", "rows")],
)
def test_numbers_that_sixty_four_bits_hold_may_still_be_too_large(command, option, number, never, capsys):
    message = refused(capsys, command, f"--{option}", number)
    assert message == f"rpfunc: {command}: {option} is {number}, it must be at most {10**18}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--microbatches", 10**6), "microbatches is 1000000, it must be at most 2941 for 34 layers"),
        (("--microbatches", 10**6, "--schedule", "looped_bfs"), "microbatches is 1000000, it must be at most 2941"),
        (("--hardware", "999999999x4090"), "workers is 999999999, it must be at most 2941 for 34 layers"),
    ],
)
def test_a_simulation_that_would_take_hours_is_refused(arguments, message, capsys):
    assert message in refused(capsys, "simulate", *arguments)


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (("train", "--steps", "9" * 300), "from -9223372036854775807 to 9223372036854775807"),
        (("train", "--model.width", "9" * 300), "at most 2147483647"),
        (("sample", "run", "--length", "9" * 300), "from -9223372036854775807 to 9223372036854775807"),
        (("sample", "run", "--seed", "-" + "9" * 300), "from -9223372036854775807 to 9223372036854775807"),
    ],
)
def test_the_other_commands_refuse_them_too(arguments, needed, capsys):
    assert f"it must be {needed}" in refused(capsys, *arguments)


def test_numbers_in_a_file_are_options(capsys, tmp_path):
    path = tmp_path / "large.toml"
    path.write_text(f"steps = {'9' * 300}")
    assert "rpfunc: options: steps is 9999" in refused(capsys, "train", path)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "output: No space left on device"),
        (PermissionError(13, "Permission denied", "x.png"), "x.png: Permission denied"),
        (MemoryError(), "this machine has too little for that: out of memory"),
        (RuntimeError("can't start new thread"), "this machine has too little for that: can't start new thread"),
    ],
)
def test_what_fails_later_for_want_of_room_is_one_message(error, message, monkeypatch, capsys):
    def fails(*arguments):
        raise error

    monkeypatch.setattr(app, "simulate_command", fails)
    assert refused(capsys, "simulate") == f"rpfunc: {message}\n"


def test_a_fault_of_rpfunc_itself_is_not_hidden(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("a fault")

    monkeypatch.setattr(app, "simulate_command", fails)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["simulate"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("errors_too", [False, True])
def test_an_output_that_is_full_is_one_message(errors_too):
    with open("/dev/full", "w") as full:
        program = "import sys; from rpfunc.cli import main; sys.exit(main(['--help']))"
        ended = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full,
            stderr=full if errors_too else subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.returncode == 2
    assert errors_too or ended.stderr == "rpfunc: output: No space left on device\n"
