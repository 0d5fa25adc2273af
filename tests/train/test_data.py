import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import random
from rpfunc.errors import OptionsError
from rpfunc.objectives import sft
from rpfunc.train.data import held_out_batch, read_bytes, split_held_out, to_tokens, training_batch


@given(length=st.integers(2, 60), rows=st.integers(2, 20))
def test_each_held_out_byte_but_the_first_is_predicted_once(length, rows):
    text = torch.arange(length).to(torch.uint8)
    prepared = sft().prepare(held_out_batch(text, rows))
    targets = prepared.row["targets"]
    assert sorted(targets[targets >= 0].tolist()) == list(range(1, length))


@given(length=st.integers(4, 50), rows=st.integers(2, 4), step=st.integers(0, 9))
def test_training_windows_are_pieces_of_the_text_and_a_function_of_the_step(length, rows, step):
    text = torch.arange(length).to(torch.uint8)
    batches = [training_batch(text, random.key(1), at, 5, rows) for at in (step, step, step + 1)]
    first, again, following = (batch.row["tokens"] for batch in batches)
    assert bool((first.diff(dim=1) == 1).all())
    assert torch.equal(first, again)
    assert batches[0].constant["key"] == batches[1].constant["key"] != batches[2].constant["key"]
    assert first.shape == following.shape == (5, rows)


def test_every_window_can_be_drawn():
    text = torch.arange(10).to(torch.uint8)
    starts = {int(s) for step in range(60) for s in training_batch(text, random.key(0), step, 4, 8).row["tokens"][:, 0]}
    assert starts == {0, 1, 2}


def test_texts_that_cannot_serve_are_refused(tmp_path):
    with pytest.raises(OptionsError, match=r"has 3 tokens, one row of data\.rows needs 4"):
        to_tokens(tmp_path / "short", b"abc", list, 4)
    with pytest.raises(OptionsError, match=r"cannot read .*: No such file"):
        read_bytes(tmp_path / "none")
    with pytest.raises(OptionsError, match=r"cannot read .*: Is a directory"):
        read_bytes(tmp_path)
    with pytest.raises(OptionsError, match="leaves 5 to train on and 5 held"):
        split_held_out(torch.zeros(10, dtype=torch.uint8), 0.5, 6)
