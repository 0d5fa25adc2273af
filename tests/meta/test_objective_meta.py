"""Objectives that are wrong in ways seen in the wild: the check of promises must refuse each, and say why."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from oracle import dense_objective as dense

from rpfunc import Batch
from rpfunc.objectives import IGNORED, Objective, dpo, grpo, sft, weighted_mean
from rpfunc.objectives.targets import is_target, num_tokens
from rpfunc.testing.objectives import assert_streams_objective

VOCABULARY = 5


def make_batch(num_groups, num_rows, seed, *, group_size=1):
    generator = torch.Generator().manual_seed(seed)
    shape = num_groups * group_size, num_rows
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = IGNORED
    labels[torch.rand(shape[0], generator=generator) < 0.15] = IGNORED
    old = torch.randn(shape, generator=generator, dtype=torch.float64) - 1.6
    numbers = torch.randn(2, shape[0], generator=generator, dtype=torch.float64)
    example = {"advantages": numbers[0]} if group_size == 1 else {"reference_logprobs": numbers[1] - 4}
    row = {"labels": labels} | ({"old_logprobs": old} if group_size == 1 else {})
    return Batch(row=row, example=example, group_size=group_size)


def labels_alone(num_groups, num_rows, seed):
    batch = make_batch(num_groups, num_rows, seed)
    return Batch(row={"labels": batch.row["labels"]})


def shift_in_the_chunk():
    def score(logits, batch):
        targets = F.pad(batch.row["labels"][:, 1:], (0, 1), value=IGNORED)
        return sft().score(logits, replace(batch, row={"targets": targets}))

    return replace(sft(), score=score)


def mean_of_chunk_means():
    def score(logits, batch):
        return sft().score(logits, batch) / is_target(batch).sum().clamp(min=1)

    return replace(sft(), score=score, loss=lambda sums, batch, total: sums.sum())


def own_denominator():
    def loss(sums, batch, total):
        return weighted_mean(sums, num_tokens(batch))

    return replace(sft(), loss=loss)


def centred_over_rows():
    return replace(
        sft(), score=lambda logits, batch: sft().score(logits - logits.mean(dim=1, keepdim=True).square(), batch)
    )


def falsely_linear():
    return replace(grpo(ratio="sequence"), linear=True)


def mask_after_exp():
    """Leaves the old log-probabilities of masked places as they are, and masks what comes of them."""

    def prepare(batch):
        prepared = grpo().prepare(batch)
        old = F.pad(batch.row["old_logprobs"][:, 1:], (0, 1))
        return replace(prepared, row={**prepared.row, "target_old_logprobs": old})

    def score(logits, batch):
        targets = batch.row["targets"].clamp(min=0).unsqueeze(-1)
        ratio = torch.exp(logits.log_softmax(dim=-1).gather(-1, targets).squeeze(-1) - batch.row["target_old_logprobs"])
        return (-ratio * batch.example["advantages"].unsqueeze(1)).where(is_target(batch), 0.0)

    return replace(grpo(), prepare=prepare, score=score)


def two_masks_in_one_mean():
    def total(batch):
        return torch.tensor(float(batch.num_examples * (batch.num_rows - 1)), dtype=torch.float64)

    return replace(sft(), total=total)


def counts_masked_sequences():
    def total(batch):
        return torch.tensor(float(batch.num_examples), dtype=torch.float64)

    return replace(grpo(normalisation="sequence"), total=total)


def reference_from_the_policy():
    def loss(sums, batch, total):
        return dpo().loss(sums, replace(batch, example={"reference_logprobs": sums.detach()}), total)

    return replace(dpo(), loss=loss)


def divides_by_nothing():
    return replace(sft(), loss=lambda sums, batch, total: sums.sum() / total)


def divides_by_nothing_in_pairs():
    def loss(sums, batch, total):
        return F.softplus(sums[1::2] - sums[::2] - batch.example["reference_logprobs"][::2]).sum() / total

    return replace(dpo(), loss=loss)


def constant_where_nothing_is_scored():
    return replace(sft(), loss=lambda sums, batch, total: weighted_mean(sums, total) + (total == 0))


def overflows():
    return replace(sft(), loss=lambda sums, batch, total: weighted_mean((sums * 1e300).exp(), total))


def root_of_the_count():
    return replace(sft(), total=lambda batch: num_tokens(batch).sqrt())


def the_longest_text():
    return replace(sft(), total=lambda batch: is_target(batch).sum(1).max().double())


def adds(name):
    """Adds a leaf at every place of a text that has labels, at those without one too."""

    def prepare(batch):
        prepared = sft().prepare(batch)
        scored = is_target(prepared).any(1, keepdim=True)
        return replace(prepared, row={**prepared.row, "added": batch.row[name] * scored})

    def score(logits, batch):
        return sft().score(logits, batch) + 0.1 * batch.row["added"]

    return replace(sft(), prepare=prepare, score=score)


def rewards_without_labels():
    return adds("reward")


def flags_without_labels():
    return adds("flag")


def with_rewards(num_groups, num_rows, seed):
    batch = make_batch(num_groups, num_rows, seed)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(4, batch.row["labels"].shape, generator=generator)
    return Batch(row={"labels": batch.row["labels"], "reward": draws, "flag": draws > 1})


def without_labels(num_groups, num_rows, seed):
    return Batch(row={"labels": torch.full((num_groups, num_rows), IGNORED)})


def multiplied_by_the_rows():
    return replace(sft(), score=lambda logits, batch: sft().score(logits, batch) * batch.num_rows)


def with_group_rewards(num_groups, num_rows, seed):
    batch = make_batch(num_groups, num_rows, seed, group_size=2)
    rewards = torch.rand(num_groups, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Batch(row={"labels": batch.row["labels"]}, group={"reward": {"final": rewards}}, group_size=2)


def group_rewards_without_labels():
    """A reward counts even where no example of its group has a label."""

    def prepare(batch):
        prepared = sft().prepare(batch)
        reward = batch.group["reward"]["final"].repeat_interleave(2)
        return replace(prepared, example={**prepared.example, "added": reward})

    return replace(
        sft(),
        prepare=prepare,
        loss=lambda sums, batch, total: sft().loss(sums + 0.1 * batch.example["added"], batch, total),
    )


def nested_weights(num_groups, num_rows, seed):
    batch = make_batch(num_groups, num_rows, seed)
    labels = batch.row["labels"]
    return Batch(row={"labels": labels, "nested": {"weight": torch.ones(labels.shape, dtype=torch.float64)}})


WRONG = {
    group_rewards_without_labels: (
        with_group_rewards,
        "what stands where there is no label changes the loss|examples without a label still count",
    ),
    root_of_the_count: (labels_alone, "^`total` is .* of the whole batch, and .* added up over its groups"),
    the_longest_text: (labels_alone, "^`total` is .* of the whole batch, and .* added up over its groups"),
    rewards_without_labels: (with_rewards, "what stands where there is no label changes the loss or a gradient"),
    flags_without_labels: (with_rewards, "what stands where there is no label changes the loss or a gradient"),
    multiplied_by_the_rows: (without_labels, "sft: `total` was 0 in all draws, so nothing was ever scored"),
    shift_in_the_chunk: (labels_alone, "the score of row 0 is another one when the row stands alone"),
    mean_of_chunk_means: (labels_alone, "the score of row 0 is another one when the row stands alone"),
    centred_over_rows: (labels_alone, "the score of row 0 is another one|what stands where there is no label"),
    own_denominator: (labels_alone, "streamed loss and gradients are not those of one plain vjp"),
    falsely_linear: (make_batch, "declared linear, but the derivative"),
    divides_by_nothing: (
        labels_alone,
        "^no label at all in a batch, so `total` is 0: .*the loss is nan .*weighted_mean",
    ),
    divides_by_nothing_in_pairs: (partial(make_batch, group_size=2), "^no label at all in a batch, so `total` is 0"),
    constant_where_nothing_is_scored: (labels_alone, "^no label at all in a batch, so `total` is 0: .*the loss is 1 "),
    overflows: (labels_alone, "^the loss is inf .* of finite sums .*; they must be finite"),
    mask_after_exp: (make_batch, "what stands where there is no label changes the loss or a gradient"),
    two_masks_in_one_mean: (labels_alone, "examples without a label still count|a row of padding changes"),
    counts_masked_sequences: (make_batch, "examples without a label still count"),
    reference_from_the_policy: (
        partial(make_batch, group_size=2),
        "dpo: no effect on the loss in any draw, so not read: example leaf 'reference_logprobs'",
    ),
}


@pytest.mark.parametrize(
    ("batches", "leaf"),
    [(nested_weights, "row leaf 'nested.weight'"), (with_group_rewards, "group leaf 'reward.final'")],
)
def test_a_leaf_that_is_not_read_is_told_wherever_it_is(batches, leaf):
    with pytest.raises(AssertionError, match=f"^sft: no effect on the loss in any draw, so not read: {leaf}$"):
        assert_streams_objective(sft(), batches, VOCABULARY, max_examples=12)


@pytest.mark.parametrize("make_objective", WRONG)
def test_wrong_objective_is_refused(make_objective):
    batches, message = WRONG[make_objective]
    with pytest.raises(AssertionError, match=message):
        assert_streams_objective(make_objective(), batches, VOCABULARY, max_examples=12)


@pytest.mark.parametrize(
    ("objective", "formula"),
    [
        (dpo(beta=0.2), dense.dpo),
        (dpo(variant="ipo"), dense.dpo),
        (replace(dpo(), loss=lambda sums, batch, total: dpo().loss(2 * sums, batch, total)), dense.dpo),
    ],
    ids=["another-beta", "another-variant", "twice-the-sums"],
)
def test_another_formula_is_refused(objective, formula):
    with pytest.raises(AssertionError, match="loss and gradients are not those of the dense formula"):
        assert_streams_objective(objective, partial(make_batch, group_size=2), VOCABULARY, dense=formula)


def test_a_users_own_objective_is_two_functions():
    """Squared error of a model's output, per token: nothing of rpfunc's log-probabilities."""

    def prepare(batch):
        wanted = F.pad(batch.row["wanted"][:, 1:], (0, 1))
        valid = F.pad(batch.row["labels"][:, 1:] != IGNORED, (0, 1))
        return replace(batch, row={**batch.row, "target": wanted.masked_fill(~valid, 0.0), "valid": valid})

    objective = Objective(
        "squared",
        prepare=prepare,
        total=lambda batch: batch.row["valid"].sum().double(),
        score=lambda output, batch: (output.masked_fill(~batch.row["valid"], 0.0) - batch.row["target"]).square(),
        loss=lambda sums, batch, total: weighted_mean(sums, total),
    )

    def batches(num_groups, num_rows, seed):
        batch = make_batch(num_groups, num_rows, seed)
        return Batch(row={"labels": batch.row["labels"], "wanted": batch.row["old_logprobs"]})

    def outputs(num_examples, num_rows, generator):
        return torch.randn(num_examples, num_rows, generator=generator, dtype=torch.float64)

    assert_streams_objective(objective, batches, VOCABULARY, make_output=outputs)
