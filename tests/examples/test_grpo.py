"""The GRPO example and its task, shortened: what it claims happens, and its gradients are the exact ones."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rpfunc import random, reference, tree, value_and_grad

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def grpo(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # where a script finds its siblings
    for name in ("arithmetic", "grpo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("grpo")
    for name in ("arithmetic", "grpo"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("completion", "reward"), [("13\n", 1), ("13", 0), ("1\n", 0), ("3\n", 0), ("013", 0), ("\n", 0), ("", 0)]
)
def test_only_the_whole_right_answer_is_right(grpo, completion, reward):
    assert grpo.arithmetic.verify("9+4=", completion) == reward


def test_prompts_are_all_sums_and_no_held_out_one_is_trained_on(grpo):
    train, held_out = grpo.arithmetic.split_prompts(random.key(0), held_out=20)
    assert len(train) == 80
    assert len(held_out) == 20
    assert {*train, *held_out} == {f"{a}+{b}=" for a in range(10) for b in range(10)}
    drawn = grpo.arithmetic.draw(random.key(1), train, 30)
    assert len(set(drawn)) == 30
    assert set(drawn) <= set(train)


def test_labels_are_the_completions_own_tokens(grpo):
    batch = grpo.arithmetic.labelled(["3+4=", "9+8="], ["7\n", "17\n"])
    assert bytes(batch.row["tokens"].flatten().tolist()) == b"3+4=7\n\x009+8=17\n"
    none = [-100] * 4
    assert batch.row["labels"].tolist() == [[*none, *b"7\n", -100], [*none, *b"17\n"]]


def test_completions_of_a_batch_are_those_of_each_prompt_and_end_at_a_newline(grpo):
    prompts = [f"{a}+{b}=" for a in range(10) for b in range(3)]
    params = _initial(grpo)
    params["embedding"] = params["embedding"] * 30  # logits far apart: no argmax hangs on rounding
    together = grpo.arithmetic.complete(grpo.MODEL, params, prompts)
    assert together == [grpo.arithmetic.complete(grpo.MODEL, params, [prompt])[0] for prompt in prompts]
    drawn = grpo.arithmetic.complete(grpo.MODEL, _initial(grpo), prompts * 20, random.key(0))
    assert all(len(text) == 3 or text.endswith("\n") for text in drawn)
    assert all(text.count("\n") == text.endswith("\n") for text in drawn)
    assert any(len(text) < 3 for text in drawn)


def test_advantages_compare_with_the_group_and_old_logprobs_are_the_samplers(grpo, monkeypatch):
    # the reward is whether the completion's first token is odd, which an untrained policy often gets right
    monkeypatch.setattr(grpo.arithmetic, "verify", lambda prompt, completion: float(ord(completion[0]) % 2))
    params = _initial(grpo)
    batch, reward = grpo.roll_out(params, ["3+4=", "9+8="], 8, random.key(1))
    tokens = batch.row["tokens"]
    assert bytes(tokens[:, :4].flatten().tolist()) == b"3+4=" * 8 + b"9+8=" * 8
    odd = tokens[:, 4].reshape(2, 8) % 2
    assert reward == pytest.approx(odd.double().mean().item())
    advantages = batch.example["advantages"].reshape(2, 8)
    torch.testing.assert_close(advantages.sum(1), torch.zeros(2), rtol=0, atol=1e-5)
    assert torch.equal(advantages > 0, odd == 1)
    logits = grpo.MODEL(params, batch)
    wanted = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    scored = batch.row["labels"][:, 1:] != -100
    torch.testing.assert_close(batch.row["old_logprobs"][:, 1:], wanted.where(scored, 0.0))


def test_the_gradient_is_the_references(grpo, monkeypatch):
    monkeypatch.setattr(grpo.arithmetic, "verify", lambda prompt, completion: float(ord(completion[0]) % 2))
    params = tree.map(torch.Tensor.double, _initial(grpo))
    batch, _ = grpo.roll_out(params, ["3+4=", "9+8=", "1+1="], 4, random.key(1))
    noise = random.normal(random.key(2), tuple(batch.row["old_logprobs"].shape), torch.float64)
    old = batch.row["old_logprobs"] + 0.2 * noise  # some ratios are clipped, as after a few updates
    batch = replace(batch, row={**batch.row, "old_logprobs": old})
    result, grads = value_and_grad(grpo.MODEL, grpo.OBJECTIVE, workers=2, **grpo.arithmetic.EXECUTION)(params, batch)
    loss, wanted = reference.value_and_grad(grpo.MODEL, grpo.OBJECTIVE)(params, batch)
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=1e-15)
    for found, exact in zip(tree.leaves(grads), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


def test_rewards_grow(grpo, capsys):
    options = grpo.Options(rollouts=10, prompts=16, group=8)
    before, after = grpo.main(options)
    assert after["shown, then rewarded"].reward > before["shown, then rewarded"].reward
    assert after["only rewarded"].reward > before["only rewarded"].reward
    out = capsys.readouterr().out
    assert "rollout  10: mean reward of the last 5 0." in out
    assert "20 sums held out: sampled reward" in out


def test_a_run_repeats(grpo):
    options = grpo.Options(warm_up_steps=5, rollouts=2, prompts=4, group=4, updates=2)
    assert grpo.main(options) == grpo.main(options)


def _initial(grpo):
    return grpo.decoder.init(grpo.arithmetic.CONFIG, random.key(0))
