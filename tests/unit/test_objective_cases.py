"""Cases that have gone wrong in other losses, with the arithmetic worked out by hand."""

from __future__ import annotations

from math import exp, inf, log, nan

import pytest
import torch

from rpfunc import Batch, Layer, Model, value, value_and_grad
from rpfunc.objectives import dpo, grpo, kto, orpo, ppo, sft, simpo
from rpfunc.objectives.logprob import entropy
from rpfunc.objectives.ratios import clipped_surrogate, k3, tangent_exp
from rpfunc.stream import rowwise
from rpfunc.testing import assert_equal, assert_equal_bits
from rpfunc.testing.objectives import table

CHUNKS = pytest.mark.parametrize("chunk", [None, 1, 2, 3, 4, 7])
MICROBATCHES = pytest.mark.parametrize("microbatches", [1, 2, 3])


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def run(objective, output, batch, **options):
    """Loss, and the gradient of the model's output."""
    result, grads = value_and_grad(table(), objective, **options)({"output": output}, batch)
    return result.loss, grads["output"]


def logits_of(probabilities):
    return torch.log(doubles(*probabilities))


# Denominators


def one_token_losses(losses):
    """Logits (0, z) with -log p[0] = loss, for each row, and one row more that predicts nothing."""
    z = torch.log(torch.expm1(doubles(*losses, 1.0)))
    return torch.stack((torch.zeros_like(z), z), dim=-1)


def test_tokens_count_alike_in_microbatches_of_7_1_and_2_tokens():
    logits = torch.stack([one_token_losses([loss] * 7) for loss in (1.0, 8.0, 3.0)])
    labels = torch.full((3, 8), -100)
    for example, count in enumerate((7, 1, 2)):
        labels[example, 1 : 1 + count] = 0
    batch = Batch(row={"labels": labels})
    for microbatches in (1, 2, 3):
        loss, _ = run(sft(), logits, batch, microbatches=microbatches)
        assert loss.item() == pytest.approx(2.1, abs=1e-12)
    first, _ = run(sft(), logits[:2], batch.examples(0, 2), microbatches=2)
    last, _ = run(sft(), logits, Batch(row={"labels": labels.where(torch.tensor([[0], [0], [1]]) == 1, -100)}))
    assert (first.item(), last.item()) == (pytest.approx(1.875, abs=1e-12), pytest.approx(3.0, abs=1e-12))


@CHUNKS
@pytest.mark.parametrize(
    "objective", [sft(), sft(z_loss=0.1), grpo(), grpo(ratio="sequence", normalisation="sequence")]
)
def test_a_batch_without_labels_has_loss_0_total_0_and_gradients_0(objective, chunk):
    row = {"labels": torch.full((2, 6), -100), "old_logprobs": torch.full((2, 6), nan)}
    batch = Batch(row=row, example={"advantages": torch.full((2,), inf)})
    result, grads = value_and_grad(table(), objective, chunk=chunk)({"output": torch.randn(2, 6, 3)}, batch)
    assert (result.loss.item(), result.total.item()) == (0.0, 0.0)
    assert_equal(grads["output"], torch.zeros(2, 6, 3))


@CHUNKS
@MICROBATCHES
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, -1.0),  # not 2/8 - 5/8
        ({"normalisation": "sequence"}, -1.0),
        ({"normalisation": "length", "max_length": 6}, -0.5),
        ({"ratio": "sequence"}, -1.0),
    ],
)
def test_a_masked_completion_is_in_no_denominator(options, wanted, chunk, microbatches):
    labels = torch.full((2, 6), -100)
    labels[0, 1:4] = 0  # three tokens; the second completion's five are masked out
    logits = torch.zeros(2, 6, 2, dtype=torch.float64)
    old = torch.full((2, 6), -log(2), dtype=torch.float64)
    batch = Batch(row={"labels": labels, "old_logprobs": old}, example={"advantages": doubles(1, -1)})
    loss, _ = run(grpo(**options), logits, batch, chunk=chunk, microbatches=microbatches)
    assert loss.item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("objective", [dpo(), dpo(variant="ipo"), simpo(), orpo()], ids=["dpo", "ipo", "simpo", "orpo"])
@pytest.mark.parametrize("masked", [2, 3])
def test_a_pair_with_an_empty_completion_counts_for_nothing(objective, masked):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (4, 5), generator=generator)
    labels[masked] = -100
    reference = doubles(-1, -2, nan, inf)
    batch = Batch(row={"labels": labels}, example={"reference_logprobs": reference}, group_size=2)
    loss, grads = run(objective, logits, batch)
    first = Batch(row={"labels": labels[:2]}, example={"reference_logprobs": reference[:2]}, group_size=2)
    assert_equal((loss, grads[:2]), run(objective, logits[:2], first))
    assert_equal(grads[2:], torch.zeros(2, 5, 3))


def test_weights_that_cancel_have_loss_0_unless_a_total_is_given():
    batch = Batch(row={"labels": torch.zeros(1, 3, dtype=torch.int64), "weights": torch.tensor([[9.0, 1.0, -1.0]])})
    params = {"output": torch.tensor([[[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]]], dtype=torch.float64)}
    function = value_and_grad(table(), sft())
    assert function(params, batch)[0].loss == 0.0
    wanted = log(1 + exp(1)) - log(1 + exp(2))
    assert function(params, batch, doubles(1)[0])[0].loss.item() == pytest.approx(wanted, abs=1e-12)


# The shift


@CHUNKS
def test_targets_across_chunk_borders_are_scored(chunk):
    labels = torch.randint(3, (1, 9), generator=torch.Generator().manual_seed(0))
    logits = torch.full((1, 9, 3), -50.0, dtype=torch.float64)
    for row in range(8):
        logits[0, row, labels[0, row + 1]] = 50.0
    for row in (3, 7):  # -log p = 5
        logits[0, row] = torch.log(torch.full((3,), (1 - exp(-5)) / 2, dtype=torch.float64))
        logits[0, row, labels[0, row + 1]] = -5.0
    loss, _ = run(sft(), logits, Batch(row={"labels": labels}), chunk=chunk)
    assert loss.item() == pytest.approx(1.25, abs=1e-12)


@pytest.mark.parametrize("num_rows", range(2, 13))
def test_t_rows_have_t_minus_1_targets_however_they_are_cut(num_rows):
    batch = Batch(row={"labels": torch.zeros(1, num_rows, dtype=torch.int32)})
    logits = torch.zeros(1, num_rows, 2, dtype=torch.float64)
    for chunk in range(1, 14):
        function = value_and_grad(table(), sft(), chunk=chunk)
        result, grads = function({"output": logits}, batch)
        assert result.total == num_rows - 1
        assert int((grads["output"] != 0).any(dim=-1).sum()) == num_rows - 1


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 10, 16])
def test_chunk_size_changes_nothing(chunk):
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(11, (1, 10), generator=generator)
    labels[0, [3, 4, 9]] = -100
    normal = {"hidden": (1, 10, 6), "weight": (11, 6), "bias": (11,)}
    params = {n: torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_() for n, s in normal.items()}
    logits = params["hidden"] @ params["weight"].T + params["bias"]
    wanted = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])
    wanted.backward()
    detached = {name: leaf.detach() for name, leaf in params.items()}
    result, grads = value_and_grad(HEAD, sft(), chunk=chunk)(detached, Batch(row={"labels": labels}))
    torch.testing.assert_close(result.loss, wanted.detach(), rtol=1e-12, atol=0)
    for name, leaf in params.items():
        torch.testing.assert_close(grads[name], leaf.grad, rtol=1e-10, atol=1e-14)


# Weights


def hidden_rows(hidden, x, batch):
    return hidden[:, batch.first_row : batch.first_row + batch.num_rows]


HEAD = Model(
    (
        Layer("hidden", rowwise(hidden_rows), "hidden"),
        Layer("head", rowwise(lambda p, x, batch: x @ p["w"].T + p["b"]), {"w": "weight", "b": "bias"}),
    )
)


@CHUNKS
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_weights_of_any_sign_reach_the_head_gradient(scale, chunk):
    """Row i of the hidden states is e_i, the head is 0, the loss Σ w · ce with w = (0, 2, -1, 0.5), not divided."""
    labels = torch.tensor([[0, -100, 0, 1, 3]])  # row t predicts label t+1
    weights = torch.tensor([[nan, 0.0, 2.0, -1.0, 0.5]])
    hidden = torch.cat((torch.eye(4), torch.full((1, 4), 7.0))).double().unsqueeze(0)
    params = {"hidden": hidden, "weight": torch.zeros(4, 4).double(), "bias": torch.zeros(4).double()}
    function = value_and_grad(HEAD, sft(), chunk=chunk)
    batch = Batch(row={"labels": labels, "weights": weights})
    _, grads = function(params, batch, doubles(1 / scale)[0])
    columns = doubles(0, 0, 0, 0), doubles(-1.5, 0.5, 0.5, 0.5), doubles(-0.25, 0.75, -0.25, -0.25)
    columns = (*columns, doubles(0.125, 0.125, 0.125, -0.375))
    torch.testing.assert_close(grads["weight"], scale * torch.stack(columns, dim=1), rtol=1e-15, atol=0)
    assert_equal(grads["hidden"], torch.zeros(1, 5, 4))
    _, divided = function(params, batch)
    torch.testing.assert_close(divided["weight"], torch.stack(columns, dim=1) / 1.5, rtol=1e-15, atol=0)


# Garbage where nothing is predicted, and overflow where something is


@CHUNKS
@MICROBATCHES
def test_garbage_at_masked_places_has_no_effect(chunk, microbatches):
    """Two examples of 5 tokens, 3 and 2 of them valid."""
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]).bool()
    garbage = {"old_logprobs": -200.0, "advantages": 1e30, "returns": nan, "old_values": inf}
    generator = torch.Generator().manual_seed(0)
    clean = {name: torch.randn(2, 5, generator=generator, dtype=torch.float64) for name in garbage}
    labels = torch.randint(3, (2, 5), generator=generator).where(keep, -100)
    logits = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    predicts = torch.nn.functional.pad(keep[:, 1:], (0, 1))

    def at_masked(filled):
        row = {name: leaf.where(keep, garbage[name] if filled else 0.0) for name, leaf in clean.items()}
        output = {
            "logits": logits.where(predicts.unsqueeze(-1), 1e30 if filled else 0.0),
            "values": clean["returns"].where(predicts, inf if filled else 0.0),
        }
        return run(ppo(entropy_coefficient=0.1), output, Batch(row={"labels": labels, **row}), chunk=chunk)

    found = at_masked(filled=True)
    assert_equal_bits(found, at_masked(filled=False))
    assert torch.isfinite(found[0])


def test_garbage_in_reference_logprobs_has_no_effect():
    labels = torch.tensor([[0, 1, 1, -100, -100], [0, 1, -100, -100, -100]])
    clean = torch.full((2, 5), -0.5)
    logits = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))

    def filled_with(fill):
        row = {name: clean.where(labels != -100, fill) for name in ("old_logprobs", "reference_logprobs")}
        batch = Batch(row={"labels": labels, **row}, example={"advantages": doubles(1, -1)})
        return run(grpo(kl=0.1), logits, batch)

    assert_equal_bits(filled_with(nan), filled_with(0.0))
    assert_equal_bits(filled_with(-200.0), filled_with(0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("old", [-100.0, 100.0])
def test_a_log_ratio_of_100_is_finite(old, advantage, ratio, dtype):
    row = {"labels": torch.zeros(1, 3, dtype=torch.int64), "old_logprobs": torch.full((1, 3), old, dtype=dtype)}
    batch = Batch(
        row={**row, "reference_logprobs": -row["old_logprobs"]}, example={"advantages": torch.tensor([advantage])}
    )
    loss, grads = run(grpo(ratio=ratio, kl=1e-9), torch.zeros(1, 3, 2, dtype=dtype), batch)
    assert torch.isfinite(loss)
    assert torch.isfinite(grads).all()


def test_tangent_exp_goes_on_as_a_line():
    x = doubles(-800, -1, 0, 20, 21, 100).requires_grad_()
    y = tangent_exp(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    wanted = [0.0, exp(-1), 1.0, exp(20), 2 * exp(20), 81 * exp(20)]
    assert y.tolist() == pytest.approx(wanted, rel=1e-15)
    assert slope.tolist() == pytest.approx([0.0, exp(-1), 1.0, exp(20), exp(20), exp(20)], rel=1e-15)


def test_far_from_the_reference_the_penalty_still_pulls_back():
    r = doubles(-100, 100).requires_grad_()
    (slope,) = torch.autograd.grad(k3(r).sum(), r)
    assert slope[0] < 0 < slope[1]


def test_clipped_surrogate_stops_the_gradient_only_where_the_ratio_has_gone_far_enough():
    ratio, advantage = doubles(0.5, 0.5, 1.0, 1.0, 1.5, 1.5), doubles(2, -2, 2, -2, 2, -2)
    log_ratio = ratio.log().requires_grad_()
    loss = clipped_surrogate(log_ratio, advantage, 0.2, 0.3)
    (slope,) = torch.autograd.grad(loss.sum(), log_ratio)
    assert loss.tolist() == pytest.approx([-1.0, 1.6, -2.0, 2.0, -2.6, 3.0])
    assert slope.tolist() == pytest.approx([-1.0, 0.0, -2.0, 2.0, 0.0, 3.0])


# Closed forms


def pair_logits(chosen, rejected):
    """One target a completion, with the given probabilities of token 0."""
    rows = [torch.stack((logits_of((p, 1 - p)), doubles(0, 0))) for p in (chosen, rejected)]
    return torch.stack(rows), torch.zeros(2, 2, dtype=torch.int64)


def test_dpo_of_equal_ratios_is_log_2_and_ipo_of_none_is_its_goal_squared():
    logits, labels = pair_logits(0.3, 0.6)
    batch = Batch(row={"labels": labels}, example={"reference_logprobs": doubles(log(0.3), log(0.6))}, group_size=2)
    assert run(dpo(beta=0.7), logits, batch)[0].item() == pytest.approx(log(2), abs=1e-12)
    assert run(dpo(beta=0.7, label_smoothing=0.2), logits, batch)[0].item() == pytest.approx(log(2), abs=1e-12)
    assert run(dpo(beta=0.25, variant="ipo"), logits, batch)[0].item() == pytest.approx(4.0, abs=1e-12)


def test_orpo_compares_odds():
    logits, labels = pair_logits(0.8, 0.5)  # odds 4 and 1
    batch = Batch(row={"labels": labels}, group_size=2)
    wanted = -log(0.8) + 0.5 * log(1 + 1 / 4)
    assert run(orpo(beta=0.5), logits, batch)[0].item() == pytest.approx(wanted, abs=1e-12)


def test_orpo_of_a_certain_completion_is_finite():
    logits, labels = pair_logits(0.5, 0.5)
    logits[0, 0] = doubles(1000, 0)
    loss, grads = run(orpo(), logits, Batch(row={"labels": labels}, group_size=2))
    assert torch.isfinite(loss)
    assert torch.isfinite(grads).all()


def test_kto_reads_its_baseline_from_the_batch():
    objective = kto(beta=0.5, desirable_weight=2.0)
    flags = {"desirable": torch.tensor([True, False, True]), "kl": torch.tensor([False, False, True])}
    example = {"reference_logprobs": doubles(-1, -2, -3), **flags}
    batch = objective.prepare(Batch(row={"labels": torch.zeros(3, 2, dtype=torch.int64)}, example=example))
    sums, total = doubles(-0.5, -1.0, -1.0), objective.total(batch)
    parts = objective.statistic(sums, batch)
    assert parts.tolist() == [2.0, 1.0]
    assert total == 2

    def loss(statistic):
        return objective.loss(sums, Batch(batch.row, batch.example, constant={"statistic": statistic}), total).item()

    wanted = (2 / (1 + exp(0.5 * (0.5 - 2))) + 1 / (1 + exp(0.5 * (2 - 1)))) / 2
    assert loss(parts) == pytest.approx(wanted, abs=1e-12)
    assert loss(doubles(-3, 1)) == loss(doubles(0, 0))  # a baseline below 0 is 0, and so is one of no example


def test_entropy_of_tokens_that_cannot_be():
    x = torch.tensor([[[0.0, 0.0, -inf]]], dtype=torch.float64).requires_grad_()
    found = entropy(x)
    (slope,) = torch.autograd.grad(found.sum(), x)
    assert found.item() == pytest.approx(log(2))
    assert slope.tolist() == [[[0.0, 0.0, 0.0]]]


@pytest.mark.parametrize("objective", [sft(), dpo(), grpo(ratio="sequence"), grpo()])
def test_16_bit_logits_are_widened(objective):
    logits = (30 * torch.randn(2, 5, 400, generator=torch.Generator().manual_seed(0))).bfloat16()
    labels = torch.zeros(2, 5, dtype=torch.int64)
    example = {"reference_logprobs": torch.zeros(2), "advantages": torch.ones(2)}
    batch = Batch(row={"labels": labels, "old_logprobs": torch.zeros(2, 5)}, example=example, group_size=2)
    narrow, _ = value(table(), objective)({"output": logits}, batch)
    wide, _ = value(table(), objective)({"output": logits.float()}, batch)
    assert_equal_bits(narrow, wide)
