"""The DPO example, shortened: what it claims happens, and its gradients are the exact ones."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from rpfunc import random, reference, tree, value_and_grad

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def dpo(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # where a script finds its siblings
    for name in ("arithmetic", "dpo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("dpo")
    for name in ("arithmetic", "dpo"):
        sys.modules.pop(name, None)


def test_pairs_are_right_answers_and_wrong_ones_that_the_policy_gave(dpo):
    prompts = ["3+4=", "9+8="]
    pairs = dpo.make_pairs(_initial(dpo), prompts, 5, random.key(1))
    texts = ["".join(map(chr, row[row != -100])) for row in pairs.row["labels"].tensor_split(pairs.num_examples)]
    assert pairs.group_size == 2
    assert len(texts) == 20  # an untrained policy of 64 tokens is right once in 64 * 64 answers at most
    assert texts[0::2] == ["7\n"] * 5 + ["17\n"] * 5
    assert not set(texts[1::2]) & {"7\n", "17\n"}
    assert torch.equal(dpo.margins(_initial(dpo), pairs), torch.zeros(10))


def test_the_gradient_is_the_references(dpo):
    params = tree.map(torch.Tensor.double, _initial(dpo))
    pairs = dpo.make_pairs(params, ["3+4=", "9+8=", "1+1="], 3, random.key(1))
    moved = tree.map(lambda leaf: leaf * 1.1, params)  # away from the reference policy, where all margins are 0
    result, grads = value_and_grad(dpo.MODEL, dpo.OBJECTIVE, workers=2, **dpo.arithmetic.EXECUTION)(moved, pairs)
    loss, wanted = reference.value_and_grad(dpo.MODEL, dpo.OBJECTIVE)(moved, pairs)
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=0)
    for found, exact in zip(tree.leaves(grads), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


def test_margins_grow_and_the_run_repeats(dpo, capsys):
    options = dpo.Options(warm_up_steps=40, steps=20, pairs=16, answers=8)
    before, after = dpo.main(options)
    first = capsys.readouterr().out
    assert before["trained"].margin == before["held out"].margin == 0
    assert after["trained"].margin > 0.02
    assert dpo.main(options) == (before, after)
    assert capsys.readouterr().out == first
    assert "80 trained sums: greedy answers right" in first


def _initial(dpo):
    return dpo.decoder.init(dpo.arithmetic.CONFIG, random.key(0))
