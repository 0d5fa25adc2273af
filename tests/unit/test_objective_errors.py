"""What objectives refuse, word for word."""

from inspect import signature, unwrap  # past the shape checks of tests, that would refuse another Literal first

import pytest
import torch

from rpfunc import Batch, Layer, Model, logprobs, random, value, value_and_grad
from rpfunc.errors import BatchError, ModelError, OptionsError
from rpfunc.models import decoder
from rpfunc.objectives import dpo, grpo, kto, orpo, ppo, sft, simpo
from rpfunc.plan import memory
from rpfunc.stream import rowwise

LABELS = torch.zeros(2, 3, dtype=torch.int64)
FLOATS = torch.zeros(2, 3)


NUMBERS = [
    (make, name)
    for make in (sft, dpo, simpo, orpo, kto, grpo, ppo)
    for name, option in signature(unwrap(make)).parameters.items()
    if isinstance(option.default, float) or name in ("soft_cap", "max_length", "value_clip")
]


@pytest.mark.parametrize("value", ["0.1", True, float("nan"), [0.1], 1j, torch.ones(2)], ids=str)
@pytest.mark.parametrize(("make", "name"), NUMBERS, ids=lambda each: getattr(each, "__name__", each))
def test_what_is_no_number_is_refused_by_name(make, name, value):
    others = {"normalisation": "length"} if name == "max_length" else {}
    with pytest.raises(OptionsError, match=f"^{make.__name__}: {name} is "):
        unwrap(make)(**{name: value}, **others)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: sft(label_smoothing=1.0, z_loss=-1.0, temperature=0.0, soft_cap=0.0),
            "sft: 4 problems"
            "\n  - label_smoothing is 1.0; it must be in [0, 1), for example 0.1"
            "\n  - z_loss is -1.0; it must be finite and at least 0, for example 0.0001"
            "\n  - temperature is 0.0; it must be finite and above 0, for example 1.0"
            "\n  - soft_cap is 0.0; it must be finite and above 0, for example None",
        ),
        (
            lambda: unwrap(dpo)(beta=0.0, variant="hinge"),
            "dpo: 2 problems"
            "\n  - beta is 0.0; it must be finite and above 0, for example 0.1"
            "\n  - variant is 'hinge'; it must be one of 'sigmoid', 'ipo', for example 'sigmoid'",
        ),
        (
            lambda: dpo(variant="ipo", label_smoothing=0.1),
            "dpo: label_smoothing is 0.1; variant 'ipo' has none, so it must be 0",
        ),
        (lambda: dpo(label_smoothing=0.5), "dpo: label_smoothing is 0.5; it must be in [0, 0.5), for example 0.1"),
        (
            lambda: simpo(beta=float("nan"), gamma=-0.1),
            "simpo: 2 problems"
            "\n  - beta is nan; it must be finite and above 0, for example 2.0"
            "\n  - gamma is -0.1; it must be finite and at least 0, for example 0.5",
        ),
        (lambda: orpo(beta=-0.1), "orpo: beta is -0.1; it must be finite and at least 0, for example 0.1"),
        (
            lambda: kto(desirable_weight=-1.0, undesirable_weight=float("inf")),
            "kto: 2 problems"
            "\n  - desirable_weight is -1.0; it must be finite and at least 0, for example 1.0"
            "\n  - undesirable_weight is inf; it must be finite and at least 0, for example 1.0",
        ),
        (
            lambda: unwrap(grpo)(clip_low=1.0, clip_high=-0.1, kl=-1.0, normalisation="mean", ratio="word"),
            "grpo: 5 problems"
            "\n  - clip_low is 1.0; it must be in [0, 1), for example 0.2"
            "\n  - clip_high is -0.1; it must be finite and at least 0, for example 0.2"
            "\n  - kl is -1.0; it must be finite and at least 0, for example 0.04"
            "\n  - normalisation is 'mean'; it must be one of 'token', 'sequence', 'length', for example 'token'"
            "\n  - ratio is 'word'; it must be one of 'token', 'sequence', for example 'token'",
        ),
        (
            lambda: grpo(normalisation="length"),
            "grpo: max_length is None; with normalisation 'length' it must be a whole number of at least 1, for "
            "example 1024",
        ),
        (
            lambda: grpo(max_length=8),
            "grpo: max_length is 8; with normalisation 'token' it must be None: only 'length' reads it",
        ),
        (
            lambda: ppo(clip=1.0, value_clip=0.0, value_coefficient=-1.0, entropy_coefficient=-1.0),
            "ppo: 4 problems"
            "\n  - clip is 1.0; it must be in [0, 1), for example 0.2"
            "\n  - value_clip is 0.0; it must be finite and above 0, for example 0.2"
            "\n  - value_coefficient is -1.0; it must be finite and at least 0, for example 0.5"
            "\n  - entropy_coefficient is -1.0; it must be finite and at least 0, for example 0.01",
        ),
    ],
)
def test_options(make, message):
    with pytest.raises(OptionsError) as error:
        make()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("objective", "batch", "message"),
    [
        (
            sft(),
            Batch(row={"tokens": LABELS}),
            "sft: needs row leaf 'labels' of shape (B, T) and an integer dtype, found none",
        ),
        (
            sft(),
            Batch(row={"labels": torch.zeros(2, 3, 4)}),
            "sft: needs row leaf 'labels' of shape (B, T) and an integer dtype, found (2, 3, 4) torch.float32",
        ),
        (
            sft(),
            Batch(row={"labels": LABELS - 7}),
            "sft: row leaf 'labels' holds -7; a label is a token, at least 0, or -100 for none",
        ),
        (
            sft(),
            Batch(row={"labels": LABELS, "weights": LABELS}),
            "sft: needs row leaf 'weights' of shape (B, T) and a floating-point dtype, found (2, 3) torch.int64",
        ),
        (
            dpo(),
            Batch(row={"labels": LABELS}),
            "dpo: 2 problems"
            "\n  - needs example leaf 'reference_logprobs' of shape (B,) and a floating-point dtype, found none; "
            "rpfunc.logprobs(model, reference_params, batch).sum(1) computes it"
            "\n  - needs a batch of pairs, chosen then rejected: group_size 2, found 1",
        ),
        (
            dpo(),
            Batch(row={"labels": LABELS}, example={"reference_logprobs": FLOATS}, group_size=2),
            "dpo: needs example leaf 'reference_logprobs' of shape (B,) and a floating-point dtype, "
            "found (2, 3) torch.float32; rpfunc.logprobs(model, reference_params, batch).sum(1) computes it",
        ),
        (
            orpo(),
            Batch(row={"labels": LABELS}, group_size=1),
            "orpo: needs a batch of pairs, chosen then rejected: group_size 2, found 1",
        ),
        (
            kto(),
            Batch(row={"labels": LABELS}, example={"reference_logprobs": FLOATS[:, 0], "kl": FLOATS[:, 0]}),
            "kto: 2 problems"
            "\n  - needs example leaf 'desirable' of shape (B,) and a boolean dtype, found none; "
            "True for a completion to be made more likely"
            "\n  - needs example leaf 'kl' of shape (B,) and a boolean dtype, found (2,) torch.float32; "
            "True for an example that only estimates the baseline: a prompt with another prompt's completion",
        ),
        (
            grpo(kl=0.1),
            Batch(row={"labels": LABELS}, example={"advantages": FLOATS}),
            "grpo: 3 problems"
            "\n  - needs row leaf 'old_logprobs' of shape (B, T) and a floating-point dtype, found none; "
            "rpfunc.logprobs(model, params, batch) computes it, before the first update"
            "\n  - needs row leaf 'reference_logprobs' of shape (B, T) and a floating-point dtype, found none; "
            "rpfunc.logprobs(model, reference_params, batch) computes it"
            "\n  - needs example leaf 'advantages' of shape (B,) and a floating-point dtype, "
            "found (2, 3) torch.float32; one number for each completion",
        ),
        (
            ppo(value_clip=None),
            Batch(row={"labels": LABELS, "old_logprobs": FLOATS, "advantages": FLOATS}),
            "ppo: needs row leaf 'returns' of shape (B, T) and a floating-point dtype, found none",
        ),
    ],
)
def test_batches(objective, batch, message):
    with pytest.raises(BatchError) as error:
        objective.prepare(batch)
    assert str(error.value) == message


def test_an_odd_number_of_examples_is_no_batch_of_pairs():
    with pytest.raises(BatchError, match="3 examples are no multiple of group_size 2"):
        Batch(row={"labels": torch.zeros(3, 4, dtype=torch.int64)}, group_size=2)


@pytest.mark.parametrize("chunk", [None, 2])
def test_ids_outside_the_vocabulary_are_named(chunk):
    config = decoder.DecoderConfig(vocabulary=8, width=8, layers=1, heads=1, kv_heads=1, head_size=8, mlp_width=8)
    params = decoder.init(config, random.key(0))
    tokens, labels = torch.tensor([[1, 2, 7, 0]]), torch.tensor([[1, 2, -100, 9]])
    gradient = value_and_grad(decoder.model(config), sft(), chunk=chunk)
    for wrong, message in (
        ({"tokens": tokens, "labels": labels}, "row leaf 'labels' holds 9; the logits are of tokens 0 to 7"),
        ({"tokens": tokens + 1, "labels": tokens}, "row leaf 'tokens' holds 8; the model's vocabulary is 0 to 7"),
        ({"tokens": tokens - 1, "labels": tokens}, "row leaf 'tokens' holds -1; the model's vocabulary is 0 to 7"),
    ):
        with pytest.raises(BatchError) as caught:
            gradient(params, Batch(row=wrong))
        assert str(caught.value) == f"batch: {message}"
    batch = Batch(row={"tokens": tokens, "labels": labels})
    for forward in (
        lambda: logprobs(decoder.model(config), params, batch, chunk=chunk),
        lambda: value(decoder.model(config), sft(), chunk=chunk)(params, batch),
    ):
        with pytest.raises(BatchError, match="row leaf 'labels' holds 9"):
            forward()


ROW = {"labels": LABELS, "old_logprobs": FLOATS, "advantages": FLOATS, "returns": FLOATS, "old_values": FLOATS}
LOGITS = torch.zeros(2, 3, 5)
NEEDS_VALUES = (
    "; ppo needs {'logits': (B, T, V), 'values': (B, T)}, here values (2, 3): a head of logits with a value head "
    "beside it"
)
NEEDS_LOGITS = "; needs floating-point logits (B, T, V)"


@pytest.mark.parametrize(
    ("objective", "output", "message"),
    [
        (ppo(), LOGITS, f"(2, 3, 5) torch.float32{NEEDS_VALUES}"),
        (ppo(), {"logits": LOGITS}, f"a dict of ['logits']{NEEDS_VALUES}"),
        (ppo(), {"values": FLOATS}, f"a dict of ['values']{NEEDS_VALUES}"),
        (ppo(), (LOGITS, FLOATS), f"a tuple{NEEDS_VALUES}"),
        (
            ppo(),
            {"logits": LOGITS, "values": FLOATS[..., None]},
            f"'values' (2, 3, 1) torch.float32{NEEDS_VALUES}",
        ),
        (ppo(), {"logits": FLOATS, "values": FLOATS}, f"(2, 3) torch.float32{NEEDS_LOGITS}"),
        *[
            (objective, output, f"{found}{NEEDS_LOGITS}")
            for objective in (sft(), grpo(), grpo(ratio="sequence"))
            for output, found in (
                ({"logits": LOGITS, "values": FLOATS}, "a dict of ['logits', 'values']"),
                (FLOATS, "(2, 3) torch.float32"),
                (LOGITS.long(), "(2, 3, 5) torch.int64"),
            )
        ],
        (
            sft(),
            LOGITS[:, :1],
            "logits of (2, 1) examples and rows, the batch has (2, 3); a row of logits is needed for each row of the "
            "batch",
        ),
    ],
)
def test_outputs_that_an_objective_cannot_score(objective, output, message):
    batch = Batch(row=ROW, example={"advantages": FLOATS[:, 0]})
    with pytest.raises(ModelError) as caught:
        objective.score(output, objective.prepare(batch))
    assert str(caught.value) == f"output: the last layer gives {message}"


@pytest.mark.parametrize("chunk", [2.5, "2", 0, -1])
def test_chunks_that_are_no_number_of_rows(chunk):
    batch, head = Batch(row={"labels": LABELS}), Layer("head", rowwise(lambda p, x, batch: p[batch.row["labels"]]), "p")
    for call in (
        lambda: logprobs(Model((head,)), {"p": LOGITS[0]}, batch, chunk=chunk, microbatches=chunk),
        lambda: value(Model((head,)), sft(), chunk=chunk, microbatches=chunk),
        lambda: memory(Model((head,)), sft(), {"p": LOGITS[0]}, batch, chunk=chunk, microbatches=chunk),
    ):
        with pytest.raises(OptionsError) as caught:
            call()
        assert f"chunk is {chunk!r}, it must be at least 1 row (or None for whole rows)" in str(caught.value)
        needed = "at least 1" if isinstance(chunk, int) else "a whole number"
        assert f"microbatches is {chunk!r}, it must be {needed}" in str(caught.value)
