"""A run that fails before its first step leaves nothing, and of others nothing is taken."""

import pytest
from cli.tiny_runs import metrics, steps_done, tree_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rpfunc.errors import ModelError, OptionsError
from rpfunc.files import replace_file


@pytest.mark.parametrize("out", [None, "small", "new/deep/small"])
def test_a_run_refused_before_its_first_step_leaves_nothing(folder, rpfunc, out):
    (folder / "new").mkdir()
    where = () if out is None else ("--out", out)
    before = tree_of(folder)
    code, _, errors = rpfunc("train", "tiny.toml", *where, "--worker-memory", "1000")
    assert (code, "--worker-memory=" in errors) == (2, True)
    assert tree_of(folder) == before
    assert rpfunc("train", "tiny.toml", *where, "--steps", "1")[0] == 0
    assert steps_done(folder / (out or "runs/tiny")) == 1


FAILURES = {
    "full disk at the options": ("rpfunc.train.folder.msgspec.json.format", OSError(28, "No space left on device")),
    "full disk at the metrics": ("rpfunc.train.folder.RunFolder.append", OSError(28, "No space left on device")),
    "full disk at the checkpoint": ("rpfunc.train.checkpoint.save_file", OSError(28, "No space left on device")),
    "evaluation": ("rpfunc.train.loop.value", ModelError("model: fails where it is evaluated")),
    "training": ("rpfunc.train.loop.train_steps", OptionsError("options: fail where a step begins")),
    "memory": ("rpfunc.train.loop.train_steps", MemoryError()),
    "a bug": ("rpfunc.train.loop.train_steps", ZeroDivisionError()),
    "Ctrl-C": ("rpfunc.train.loop.train_steps", KeyboardInterrupt()),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_whatever_fails_before_the_first_step_leaves_what_others_put_there(folder, rpfunc, failure, monkeypatch):
    name, error = FAILURES[failure]
    run, before = folder / "new" / "run", tree_of(folder)

    def fail(*arguments, **options):
        raise error

    def fail_beside_a_file_of_another(*arguments, **options):
        (run / "precious").write_text("mine")
        raise error

    for failing, left in ((fail, {}), (fail_beside_a_file_of_another, {run.parent, run, run / "precious"})):
        with monkeypatch.context() as patched:
            patched.setattr(name, failing)
            try:
                assert rpfunc("train", "tiny.toml", "--out", run)[0] in (2, 130)
            except ZeroDivisionError:
                assert failure == "a bug"
        assert set(tree_of(folder)) - set(before) == set(map(str, left))
    assert (run / "precious").read_text() == "mine"
    assert before.items() <= tree_of(folder).items()


def test_what_fails_after_a_step_is_kept_and_goes_on(folder, rpfunc, monkeypatch):
    assert rpfunc("train", "tiny.toml", "--out", "straight")[0] == 0
    written = []

    def fail_later(path, fill):
        written.append(path)
        if len(written) == 3:  # of step 2
            raise OSError(28, "No space left on device")
        replace_file(path, fill)

    with monkeypatch.context() as patched:
        patched.setattr("rpfunc.train.checkpoint.replace_file", fail_later)
        code, _, errors = rpfunc("train", "tiny.toml", "--out", "run")
    assert (code, "the one before it is whole" in errors) == (2, True)
    assert steps_done(folder / "run") == 1
    assert rpfunc("train", "--resume", "run")[0] == 0
    assert metrics(folder / "run") == metrics(folder / "straight")


def test_a_resumed_run_that_fails_before_its_first_step_is_left_as_it_was(folder, rpfunc, monkeypatch):
    assert rpfunc("train", "tiny.toml", "--out", "run", "--steps", "1", "--sample-tokens", "0")[0] == 0
    path = folder / "run" / "checkpoint.safetensors"
    with safe_open(path, framework="pt") as file:
        notes = {**file.metadata(), "step": "0"}  # as if killed before the first step
    save_file(load_file(path), path, metadata=notes)

    def fail(*arguments, **options):
        raise OptionsError("options: fail where a step begins")

    monkeypatch.setattr("rpfunc.train.loop.train_steps", fail)
    names = set(tree_of(folder))
    assert rpfunc("train", "--resume", "run")[0] == 2
    assert set(tree_of(folder)) == names
