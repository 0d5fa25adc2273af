"""Golden vectors of trl and liger-kernel, made by make_objective_golden.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rpfunc import Batch, Layer, Model, value_and_grad
from rpfunc.objectives import dpo, grpo, kto, orpo, simpo
from rpfunc.stream import rowwise
from rpfunc.stream.logprobs import logprobs
from rpfunc.testing import gradient_error

GOLDEN = json.loads(Path(__file__).with_name("objective_golden.json").read_text())

MODEL = Model(
    (
        Layer("table", rowwise(lambda table, x, batch: table[batch.row["tokens"]]), "table"),
        Layer("head", rowwise(lambda head, x, batch: x @ head.T), "head"),
    )
)

TOLERANCES = {"trl": 1e-10, "liger": 1e-5}
"""liger takes log-softmax in float32; so does trl's odds ratio."""


def params_of(name):
    return {leaf: torch.tensor(values, dtype=torch.float64) for leaf, values in GOLDEN[name].items()}


def plain(labels="labels", examples=None):
    """The golden tokens, with what each objective may read of them."""
    batch = Batch(row={"tokens": torch.tensor(GOLDEN["tokens"]), "labels": torch.tensor(GOLDEN[labels])})
    old, reference = (logprobs(MODEL, params_of(name), batch) for name in ("old", "reference"))
    row = {**batch.row, "old_logprobs": old, "reference_logprobs": reference}
    example = {"advantages": torch.tensor(GOLDEN["advantages"], dtype=torch.float64)}
    return Batch(row=row, example={**example, "reference_logprobs": reference.sum(1)})


def pairs(labels="labels", reference=True):
    batch = plain(labels)
    judged = batch.example["reference_logprobs"]
    return Batch(batch.row, {"reference_logprobs": judged if reference else torch.zeros_like(judged)}, group_size=2)


def judged():
    """The golden examples, and then as many that only estimate the baseline."""
    rows = {name: torch.tensor(GOLDEN[name] + GOLDEN[f"kl_{name}"]) for name in ("tokens", "labels")}
    reference = logprobs(MODEL, params_of("reference"), Batch(row=rows)).sum(1)
    flags = {"desirable": [*GOLDEN["desirable"], *[True] * 4], "kl": [*[False] * 4, *[True] * 4]}
    example = {name: torch.tensor(values) for name, values in flags.items()}
    return Batch(row=rows, example={**example, "reference_logprobs": reference})


CLIPS = {"clip_low": 0.1, "clip_high": 0.3, "kl": 0.1}
LENGTH = {"normalisation": "length", "max_length": 8}

AGREEING = {
    "trl_dpo": (dpo(0.3), pairs),
    "trl_ipo": (dpo(0.3, variant="ipo"), pairs),
    "trl_cpo_smooth": (dpo(0.3, label_smoothing=0.1), lambda: pairs(reference=False)),
    "trl_simpo": (simpo(2.0, 0.5), pairs),
    "trl_orpo": (orpo(0.5), pairs),
    "trl_kto": (kto(0.2, 1.2, 0.7), judged),
    "trl_grpo_token": (grpo(**CLIPS), plain),
    "trl_grpo_dapo": (grpo(**CLIPS), plain),
    "trl_grpo_sequence": (grpo(**CLIPS, normalisation="sequence"), plain),
    "trl_grpo_length": (grpo(**CLIPS, **LENGTH), plain),
    "trl_gspo": (grpo(**CLIPS, ratio="sequence", normalisation="sequence"), plain),
    "trl_gspo_token": (grpo(**CLIPS, ratio="sequence"), plain),
    "trl_grpo_token_masked": (grpo(**CLIPS), lambda: plain("labels_masked")),
    "liger_dpo": (dpo(0.3), pairs),
    "liger_simpo": (simpo(2.0, 0.5), pairs),
    "liger_orpo_equal": (orpo(0.5), lambda: pairs("labels_equal")),
    "liger_kto": (kto(0.2), judged),
    "liger_grpo_token": (grpo(**CLIPS), plain),
    "liger_grpo_sequence": (grpo(**CLIPS, normalisation="sequence"), plain),
    "liger_grpo_length": (grpo(**CLIPS, **LENGTH), plain),
    "liger_gspo": (grpo(**CLIPS, ratio="sequence", normalisation="sequence"), plain),
}

MASKED_COUNTS = {
    "trl_grpo_sequence_masked": (grpo(**CLIPS, normalisation="sequence"), lambda: plain("labels_masked")),
    "trl_grpo_length_masked": (grpo(**CLIPS, **LENGTH), lambda: plain("labels_masked")),
}


def check(objective, batch, wanted, tolerance):
    result, grads = value_and_grad(MODEL, objective, microbatches=2, chunk=2)(params_of("params"), batch)
    found = {"loss": result.loss, "grads": grads}
    assert gradient_error(found, wanted) <= tolerance


def golden(name, factor=1.0):
    case = GOLDEN["cases"][name]
    wanted = {"loss": case["loss"], "grads": case["grads"]}
    doubles = {leaf: factor * torch.tensor(values, dtype=torch.float64) for leaf, values in wanted["grads"].items()}
    return {"loss": factor * torch.tensor(wanted["loss"], dtype=torch.float64), "grads": doubles}


@pytest.mark.parametrize("name", AGREEING)
def test_loss_and_gradients_are_those_of_the_other_library(name):
    objective, batch = AGREEING[name]
    tolerance = 1e-5 if name == "trl_orpo" else TOLERANCES[name.split("_")[0]]
    check(objective, batch(), golden(name), tolerance)


@pytest.mark.parametrize("name", MASKED_COUNTS)
def test_trl_counts_a_masked_completion_in_the_denominator(name):
    """It divides by 4 completions where 3 have a token: two masks in one mean. Ours is 4/3 of it."""
    objective, batch = MASKED_COUNTS[name]
    check(objective, batch(), golden(name, factor=4 / 3), TOLERANCES["trl"])


def test_liger_takes_its_orpo_likelihood_over_all_tokens():
    """ORPO's first term is a mean over tokens of a pair, then over pairs; liger's weighs pairs by their length."""
    batch, params = pairs(), params_of("params")
    result, _ = value_and_grad(MODEL, orpo(0.5))(params, batch)
    chosen = logprobs(MODEL, params, batch)[0::2]
    count = (batch.row["labels"][0::2] != -100).sum(1)
    by_pair, by_token = (chosen.sum(1) / count).mean(), chosen.sum() / count.sum()
    theirs = golden("liger_orpo")["loss"]
    torch.testing.assert_close(result.loss + by_pair, theirs + by_token, rtol=1e-5, atol=0)
    assert abs(result.loss - theirs) > 1e-2


def test_every_golden_vector_is_compared():
    assert GOLDEN["cases"].keys() == AGREEING.keys() | MASKED_COUNTS.keys() | {"liger_orpo"}
