"""What is given with --resume is what the run has, or is refused by its name."""

import pytest
from cli.tiny_runs import tree_of, write_files

from rpfunc.cli import main

GIVEN = {
    "a flag": (("--steps", "7"), ["--steps is 7, the run has 3"]),
    "one that is the default": (("--workers", "4"), ["--execution.workers is 4, the run has 2"]),
    "none, where there was one": (("--execution.chunk", "4"), ["--execution.chunk is 4, the run has None"]),
    "another name": (("--worker-memory", "9"), ["--execution.worker-memory is 9, the run has None"]),
    "a word": (("--precision", "float16"), ["--precision is 'float16', the run has 'float32'"]),
    "off": (("--optimizer.no-async",), ["--optimizer.async is False, the run has True"]),
    "a section that the run has not": (
        ("--lora.rank", "2", "--lora.targets", "*"),
        ["--lora.rank is 2, the run has None"],
    ),
    "a config": (("tiny.toml",), ["--steps is 6, the run has 3"]),
    "a flag over a config": (("tiny.toml", "--steps", "3", "--seed", "1"), ["--seed is 1, the run has 0"]),
    "several": (
        ("--seed", "5", "--model.width", "16"),
        ["2 problems", "--seed is 5, the run has 0", "--model.width is 16, the run has 8"],
    ),
}


@pytest.fixture(scope="module")
def run_of_three_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert main(["train", "tiny.toml", "--out", "run", "--steps", "3", "--optimizer.async"]) == 0
    return folder


@pytest.mark.parametrize("case", GIVEN)
def test_options_that_a_resumed_run_does_not_have_are_refused_by_name(run_of_three_steps, rpfunc, monkeypatch, case):
    monkeypatch.chdir(run_of_three_steps)
    before = tree_of(run_of_three_steps)
    arguments, messages = GIVEN[case]
    config = [argument for argument in arguments if argument.endswith(".toml")]
    code, _, errors = rpfunc("train", *config, "--resume", "run", *arguments[len(config) :])
    assert code == 2
    assert "a run goes on with its own options; leave out what differs, or begin another run with --out: " in errors
    assert [message for message in messages if message not in errors] == []
    assert tree_of(run_of_three_steps) == before


def test_options_that_a_resumed_run_has_may_be_given(run_of_three_steps, rpfunc, monkeypatch):
    monkeypatch.chdir(run_of_three_steps)
    same = ("--workers", "2", "--optimizer.async", "--data.text", "text.txt", "--model.width", "8", "--steps", "3")
    for arguments in (("--resume", "run", *same), ("tiny.toml", "--steps", "3", "--resume=run")):
        code, output, errors = rpfunc("train", *arguments)
        assert (code, errors, "after step 3 of 3" in output) == (0, "", True)
    code, _, errors = rpfunc("train", "--resume", "run", "--out", "other")
    assert (code, errors) == (
        2, "rpfunc: resume: out is other, but a run goes on in its own folder, run: leave out --out\n"
    )  # fmt: skip
