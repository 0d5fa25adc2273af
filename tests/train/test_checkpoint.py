import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rpfunc import optim, random, tree
from rpfunc.errors import CheckpointError, OptionsError
from rpfunc.models import decoder
from rpfunc.models.decoder import DecoderConfig
from rpfunc.runtime import State
from rpfunc.testing import exact
from rpfunc.train import checkpoint


def state(width=8, seed=0, step=0):
    config = DecoderConfig(vocabulary=16, width=width, layers=1, heads=2, kv_heads=1, head_size=4, mlp_width=8)
    made = State.create(decoder.init(config, random.key(seed)), optim.adamw(1e-3))
    return State(made.params, made.optimizer_state, step)


def equal(left, right):
    pairs = zip(tree.leaves(left), tree.leaves(right), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_what_is_loaded_is_what_was_saved(tmp_path):
    path = tmp_path / "c.safetensors"
    saved = state(seed=1, step=7)
    checkpoint.save(path, saved, {"colour": "red"})
    loaded = checkpoint.load(path, state(seed=2))
    assert loaded.step == 7
    assert equal(loaded.params, saved.params)
    assert equal(loaded.optimizer_state, saved.optimizer_state)
    assert checkpoint.read_notes(path)["colour"] == "red"
    assert [file.name for file in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_loaded_state_does_not_live_in_the_file(tmp_path):
    path = tmp_path / "c.safetensors"
    saved = state(seed=1)
    checkpoint.save(path, saved)
    loaded = checkpoint.load(path, state())
    checkpoint.save(path, state(seed=3))
    assert equal(loaded.params, saved.params)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_file_cut_short_is_refused_by_name(tmp_path, share):
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, state())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match=r"c\.safetensors: is cut short or no safetensors file"):
        checkpoint.load(path, state())


def test_a_missing_file_and_a_foreign_one_are_refused(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(CheckpointError, match="there is no such file"):
        checkpoint.load(tmp_path / "none", state())
    with pytest.raises(CheckpointError, match="is cut short or no safetensors file"):
        checkpoint.load(tmp_path, state())
    save_file({"w": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="but no 'rpfunc checkpoint 2'"):
        checkpoint.load(tmp_path / "other", state())


def test_another_model_is_refused_with_every_difference(tmp_path):
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, state(width=8))
    with pytest.raises(CheckpointError, match="is of another model or optimizer") as caught:
        checkpoint.load(path, state(width=10))
    differing = sum(
        a.shape != b.shape
        for a, b in zip(tree.leaves(state(width=8).params), tree.leaves(state(width=10).params), strict=True)
    )
    # parameters, and two moments of each
    assert str(caught.value).count("\n  - ") == 3 * differing
    assert "params.embedding is (16, 8) torch.float32, the model needs (16, 10) torch.float32" in str(caught.value)


def test_killed_while_saving_there_is_always_a_whole_checkpoint_of_one_step(tmp_path):
    program = textwrap.dedent(
        """
        import sys, torch, pathlib
        from rpfunc.runtime import State
        from rpfunc.train import checkpoint
        path = pathlib.Path(sys.argv[1])
        for step in range(10**6):
            leaves = {f"leaf{i}": torch.full((20_000,), float(step)) for i in range(50)}
            checkpoint.save(path, State(leaves, torch.tensor(step), step))
            print(step, flush=True)
        """
    )
    path = tmp_path / "c.safetensors"
    for wait_for in ("0", "3", "7"):
        process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        while process.stdout.readline().strip() != wait_for:
            assert process.poll() is None
        process.kill()
        process.communicate()
        like = State({f"leaf{i}": torch.zeros(20_000) for i in range(50)}, torch.tensor(0))
        loaded = checkpoint.load(path, like)
        assert loaded.step >= int(wait_for)
        assert int(loaded.optimizer_state) == loaded.step
        assert all(bool((leaf == loaded.step).all()) for leaf in tree.leaves(loaded.params))


def test_a_path_may_be_text(tmp_path):
    optimizer = optim.sgd(1.0)
    state = State.create({"w": torch.ones(2)}, optimizer)
    path = str(tmp_path / "state.safetensors")
    checkpoint.save(path, state, {"what": "text"})
    assert torch.equal(checkpoint.load(path, state).params["w"], state.params["w"])
    assert checkpoint.read_notes(path)["what"] == "text"


def test_what_is_no_checkpoint_is_refused_before_anything_is_written(tmp_path):
    path, state = tmp_path / "c.safetensors", State.create(exact.init(), optim.sgd(0.5))
    odd = State(exact.init(), {"count": 3})
    for function in (lambda: checkpoint.save(path, None), lambda: checkpoint.load(path, "state")):
        with pytest.raises(CheckpointError, match=r"needs a State|there is no such file"):
            function()
    (tmp_path / "folder").mkdir()
    for function, message in [
        (lambda: checkpoint.save(path, state, {3: "text"}), "note 3 is a str, needs text under a name that is text"),
        (lambda: checkpoint.save(path, odd), "optimizer.count is a int, needs a tensor"),
        (lambda: checkpoint.save(tmp_path / "folder", state), "is there and is no regular file"),
        (lambda: checkpoint.save(os.devnull, state), "is there and is no regular file"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            function()
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
    checkpoint.save(path, state)
    with pytest.raises(CheckpointError, match="got a str, needs a State"):
        checkpoint.load(path, "state")


@pytest.mark.parametrize("scales", ["[" * 100_000, "[[1, 2, 3]]", "no list", '[["a"]]'])
def test_scales_that_cannot_be_read_are_refused(tmp_path, scales):
    path, state = tmp_path / "c.safetensors", State.create(exact.init(), optim.sgd(0.5))
    checkpoint.save(path, state)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (no mapping)
        header = {**file.metadata(), "scales": scales}
    save_file(tensors, path, metadata=header)
    with pytest.raises((CheckpointError, OptionsError)):
        checkpoint.load(path, state)


def test_notes_are_text(tmp_path):
    state = State.create({"w": torch.ones(2)}, optim.sgd(1.0))
    with pytest.raises(CheckpointError, match="note 'steps' is a int, needs text"):
        checkpoint.save(tmp_path / "state.safetensors", state, {"steps": 1})
