"""Next-token prediction: one shift, one denominator, whatever the cuts."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rpfunc import Batch, Layer, Model, random, reference, value_and_grad
from rpfunc.errors import BatchError
from rpfunc.objectives import sft, weighted_mean
from rpfunc.stream import rowwise
from rpfunc.testing import assert_close

FIXED = Model((Layer("logits", rowwise(lambda scale, x, batch: batch.row["logits"] * scale), "scale"),))
ONE = {"scale": torch.ones((), dtype=torch.float64)}


def fixed(logits, labels, **options):
    batch = Batch(row={"logits": logits, "labels": labels})
    return value_and_grad(FIXED, sft(), **options)(ONE, batch)


@pytest.mark.parametrize("chunk", [None, 1, 3, 5, 6, 11])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_batch_without_any_label_has_loss_0_and_zero_gradients(num_microbatches, chunk):
    """Where a mean over no token would be 0 / 0."""
    logits = random.normal(random.key(0), (2, 6, 3), torch.float64)
    labels = torch.full((2, 6), -100)
    for function in (
        value_and_grad(FIXED, sft(), chunk=chunk, microbatches=num_microbatches),
        reference.value_and_grad(FIXED, sft()),
    ):
        result, grads = function(ONE, Batch(row={"logits": logits, "labels": labels}))
        assert getattr(result, "loss", result).item() == 0.0
        assert getattr(result, "total", torch.zeros(())).item() == 0
        assert grads["scale"].item() == 0.0


def test_one_row_has_no_target():
    result, grads = fixed(torch.ones(1, 1, 2, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.long))
    assert (result.loss.item(), result.total.item(), grads["scale"].item()) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("chunk", [None, 1, 3, 4, 7, 10, 16])
def test_chunks_of_the_head_change_neither_loss_nor_gradients(chunk):
    """Known faults elsewhere: means of chunks summed up, ignored tokens counted in the mean."""
    hidden = random.normal(random.key(0), (1, 10, 6), torch.float64)
    weight, bias = (
        random.normal(random.key(1), (11, 6), torch.float64),
        random.normal(random.key(2), (11,), torch.float64),
    )
    labels = torch.randint(0, 11, (1, 10), generator=torch.Generator().manual_seed(0))
    labels[0, [3, 4, 9]] = -100

    def rows_of(hidden, x, batch):
        return hidden[:, batch.first_row : batch.first_row + batch.num_rows]

    source = Layer("source", rowwise(rows_of), "hidden")
    head = Layer("head", rowwise(lambda params, x, batch: x @ params["weight"].mT + params["bias"]), "head")
    params = {"hidden": hidden, "head": {"weight": weight, "bias": bias}}
    result, grads = value_and_grad(Model((source, head)), sft(), chunk=chunk)(params, Batch(row={"labels": labels}))
    leaves = [leaf.clone().requires_grad_() for leaf in (hidden, weight, bias)]
    wanted = F.cross_entropy((leaves[0] @ leaves[1].mT + leaves[2])[0, :-1], labels[0, 1:], ignore_index=-100)
    assert_close(result.loss, wanted.detach(), 1e-12)
    found = [grads["hidden"], grads["head"]["weight"], grads["head"]["bias"]]
    assert_close(found, list(torch.autograd.grad(wanted, leaves)), 1e-12)
    assert result.total.item() == 6


def test_scores_stand_one_a_row_with_zeros_where_nothing_is_predicted():
    labels = torch.tensor([[0, 1, -100, 2]])
    prepared = sft().prepare(Batch(row={"labels": labels}))
    scores = sft().score(torch.zeros(1, 4, 4), prepared)
    assert scores[0].tolist() == pytest.approx([math.log(4), 0.0, math.log(4), 0.0])


@pytest.mark.parametrize("chunk", [None, *range(1, 14)])
def test_every_row_but_the_last_is_scored_wherever_chunks_end(chunk):
    counting = replace(
        sft(),
        score=lambda logits, batch: (batch.row["targets"] != -100) + 0.0 * logits.sum(-1),
        loss=lambda sums, batch, total: sums.sum(),
    )
    for num_rows in range(2, 13):
        batch = Batch(row={"logits": torch.zeros(1, num_rows, 2), "labels": torch.zeros(1, num_rows, dtype=torch.long)})
        result, _ = value_and_grad(FIXED, counting, chunk=chunk)(ONE, batch)
        assert (result.loss.item(), result.total.item()) == (num_rows - 1, num_rows - 1)


@pytest.mark.parametrize("chunk", [None, 1, 3, 4, 8, 9, 14])
def test_targets_across_chunk_borders_count(chunk):
    """All next tokens are certain but those after rows 3 and 7, which cost 5; shifted in chunks, neither counts."""
    certain = -50.0
    logits = torch.tensor([[0.0, certain]], dtype=torch.float64).repeat(9, 1)
    logits[3, 1] = logits[7, 1] = torch.tensor(5.0, dtype=torch.float64).expm1().log()  # log(1 + e^z) = 5
    result, _ = fixed(logits[None], torch.zeros(1, 9, dtype=torch.long), chunk=chunk)
    assert result.loss.item() == pytest.approx(10 / 8, abs=1e-12)
    assert result.total.item() == 8


# Three examples with 7, 1 and 2 targets, whose tokens cost 1, 8 and 3 nats each: log(1 + e^z).
Z = torch.tensor([0.541324854612918, 7.999664481091923, 2.9489308190572983], dtype=torch.float64)
UNEVEN_LOGITS = torch.stack([torch.zeros(3, 8, dtype=torch.float64), Z[:, None].expand(3, 8)], dim=-1)
UNEVEN_LABELS = torch.full((3, 8), -100)
for example, count in enumerate((7, 1, 2)):
    UNEVEN_LABELS[example, 1 : count + 1] = 0
UNEVEN = Batch(row={"logits": UNEVEN_LOGITS, "labels": UNEVEN_LABELS})


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("chunk", [None, 1, 3, 13])
def test_the_mean_is_over_all_tokens_not_over_microbatches(chunk, num_microbatches):
    """21 / 10; a mean of means would be 4, a sum of means 12."""
    result, grads = value_and_grad(FIXED, sft(), microbatches=num_microbatches, chunk=chunk)(ONE, UNEVEN)
    assert result.loss.item() == pytest.approx(2.1, abs=1e-12)
    wanted = (torch.tensor([7, 1, 2]) * Z * torch.sigmoid(Z)).sum() / 10
    assert grads["scale"].item() == pytest.approx(wanted.item(), rel=1e-12)


def test_losses_accumulated_over_calls_share_one_total():
    """Steps of two microbatches: 15 / 8, then the short one 6 / 2, where a fixed divisor would give 1.5."""
    function, objective = value_and_grad(FIXED, sft()), sft()
    losses = []
    for group in ((0, 1), (2,)):
        pieces = [UNEVEN.examples(index, index + 1) for index in group]
        total = sum(objective.total(objective.prepare(piece)) for piece in pieces)
        results = [function(ONE, piece, total=total) for piece in pieces]
        losses.append(sum(result.loss for result, _ in results).item())
        whole, grads = function(ONE, UNEVEN.examples(group[0], group[-1] + 1))
        assert whole.loss.item() == pytest.approx(losses[-1], abs=1e-12)
        assert grads["scale"].item() == pytest.approx(sum(grads["scale"] for _, grads in results).item(), rel=1e-12)
        assert all(result.total == total for result, _ in results)
    assert losses == pytest.approx([15 / 8, 6 / 2], abs=1e-12)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"tokens": torch.zeros(1, 2)}, "none"),
        ({"labels": torch.zeros(1, 2)}, "(1, 2) torch.float32"),
        ({"labels": torch.zeros(1, 2, 3, dtype=torch.long)}, "(1, 2, 3) torch.int64"),
    ],
)
def test_labels_are_asked_for(row, found):
    with pytest.raises(BatchError) as caught:
        sft().prepare(Batch(row=row))
    assert str(caught.value) == f"sft: needs row leaf 'labels' of shape (B, T) and an integer dtype, found {found}"


def test_a_weighted_mean_of_nothing_is_0_with_zero_gradients():
    sums = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
    mean = weighted_mean(sums, torch.zeros((), dtype=torch.float64))
    (grad,) = torch.autograd.grad(mean, sums)
    assert (mean.item(), grad.tolist()) == (0.0, [0.0, 0.0])


def test_labels_are_shifted_once_in_a_batch_of_its_own():
    batch = Batch(row={"labels": torch.tensor([[1, 2, 3]])})
    prepared = sft().prepare(batch)
    assert set(batch.row) == {"labels"}
    assert prepared.row["targets"].tolist() == [[2, 3, -100]]
