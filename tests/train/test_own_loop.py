"""The loop that docs/training.md shows works as it stands there: resumed runs have the bits of straight ones."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rpfunc import State
from rpfunc.train import checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
CASES = list(itertools.product((False, True), (None, torch.bfloat16, torch.float16)))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What the page's program has defined, its folder, and what it has printed."""
    folder = tmp_path_factory.mktemp("shown")
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = []
    names = {"__name__": "__main__", "print": lambda *words: lines.append(words)}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        exec(program, names)
    return names, folder, lines


def same_file(one, other):
    tensors, others = load_file(one), load_file(other)
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
    assert [name for name in tensors if tensors[name].dtype != others[name].dtype] == []
    assert checkpoint.read_notes(one) == checkpoint.read_notes(other)


def test_the_program_resumes_with_the_same_bits_and_says_so(shown):
    _, folder, lines = shown
    assert lines.pop() == ("the same bits:", True)
    assert [words[0] for words in lines] == [1, 2, 3, 4, 5, 6, 7, 8, *range(1, 9)]
    assert lines[:8] == lines[8:]
    assert lines[3][2] < 2**16  # so that a resumed run that lost its scales would show it
    same_file(folder / "stopped.safetensors", folder / "straight.safetensors")


def how(case):
    asynchronous, dtype = case
    return {"asynchronous": asynchronous, "compute_dtype": dtype, "microbatches": 2}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{'behind' if case[0] else 'in-step'}-{case[1]}")
def test_a_run_that_crashed_goes_on_with_the_bits_of_one_that_did_not(shown, tmp_path, case):
    train, batch = shown[0]["train"], shown[0]["batch"]
    train(tmp_path / "straight", 6, workers=3, **how(case))

    def failing(step):
        if step == 5:
            raise OSError("the data's disk is gone")
        return batch(step)

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(train.__globals__, "batch", failing)
        with pytest.raises(OSError, match="disk is gone"):
            train(tmp_path / "crashed", 6, workers=2, **how(case))
    assert checkpoint.read_notes(tmp_path / "crashed")["step"] == "4"
    train(tmp_path / "crashed", 6, workers=1, **how(case))
    same_file(tmp_path / "crashed", tmp_path / "straight")


@pytest.mark.parametrize("lost", ["stale", "scales", "optimizer_state", "params", "step"])
def test_each_of_the_five_is_needed(shown, tmp_path, lost):
    """What the page says of a state that lacks one part: the bits are others."""
    train, begin, case = shown[0]["train"], shown[0]["begin"], (True, torch.float16)
    train(tmp_path / "straight", 6, workers=2, **how(case))
    train(tmp_path / "less", 4, workers=2, **how(case))
    state, former = checkpoint.load(tmp_path / "less", begin()), begin()
    values = state.values()._asdict() | {"step": state.step}
    values |= {lost: former.step if lost == "step" else getattr(former.values(), lost)}
    checkpoint.save(tmp_path / "less", State(**values))
    train(tmp_path / "less", 6, workers=2, **how(case))
    with pytest.raises(AssertionError):
        same_file(tmp_path / "less", tmp_path / "straight")


def test_a_format_of_ones_own_needs_the_five_and_no_more(shown, tmp_path):
    train, begin, case = shown[0]["train"], shown[0]["begin"], (True, torch.float16)
    train(tmp_path / "straight", 6, workers=2, **how(case))
    train(tmp_path / "own", 4, workers=2, **how(case))
    state = checkpoint.load(tmp_path / "own", begin())
    params, optimizer_state, stale, scales = state.values()
    assert stale is not None
    assert len(scales) == 2
    checkpoint.save(tmp_path / "own", State(params, optimizer_state, state.step, stale=stale, scales=scales))
    train(tmp_path / "own", 6, workers=2, **how(case))
    same_file(tmp_path / "own", tmp_path / "straight")
