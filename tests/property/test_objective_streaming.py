"""Every objective, with every option, keeps its promises and equals its formula written densely."""

from functools import partial

import pytest
import torch
from hypothesis import settings
from oracle import dense_objective as dense

from rpfunc import Batch, objectives
from rpfunc.testing.objectives import assert_streams_objective

VOCABULARY = 5


def make_batch(num_groups, num_rows, seed, *, row=(), example=(), flags=(), group_size=1):
    """Labels with prompts, gaps and, now and then, a whole example masked."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_groups * group_size, num_rows
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    labels[torch.rand(shape[0], generator=generator) < 0.15] = -100
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    floats = {name: normal(shape) - (1.6 if name.endswith("logprobs") else 0) for name in row}
    numbers = {name: normal(shape[0]) - (6 if name.endswith("logprobs") else 0) for name in example}
    bools = {name: torch.rand(shape[0], generator=generator) < 0.5 for name in flags}
    return Batch(row={"labels": labels, **floats}, example={**numbers, **bools}, group_size=group_size)


def logits_and_values(num_examples, num_rows, generator):
    normal = partial(torch.randn, num_examples, num_rows, generator=generator, dtype=torch.float64)
    return {
        "logits": 2 * torch.randn(num_examples, num_rows, VOCABULARY, generator=generator).double(),
        "values": normal(),
    }


OLD = {"row": ("old_logprobs",), "example": ("advantages",)}
OLD_AND_REFERENCE = {"row": ("old_logprobs", "reference_logprobs"), "example": ("advantages",)}
PAIRS, JUDGED_PAIRS = {"group_size": 2}, {"group_size": 2, "example": ("reference_logprobs",)}
JUDGED = {"example": ("reference_logprobs",), "flags": ("desirable", "kl")}
VALUED = ("old_logprobs", "advantages", "returns")

CASES = {
    "sft": ("sft", {}, {}),
    "sft-weights": ("sft", {"temperature": 0.7}, {"row": ("weights",)}),
    "sft-all": (
        "sft",
        {"label_smoothing": 0.1, "z_loss": 0.01, "temperature": 1.3, "soft_cap": 2.0},
        {"row": ("weights",)},
    ),
    "dpo": ("dpo", {"beta": 0.3}, JUDGED_PAIRS),
    "dpo-smooth": ("dpo", {"label_smoothing": 0.2, "temperature": 0.8, "soft_cap": 3.0}, JUDGED_PAIRS),
    "dpo-ipo": ("dpo", {"variant": "ipo", "beta": 0.5}, JUDGED_PAIRS),
    "simpo": ("simpo", {"soft_cap": 3.0}, PAIRS),
    "orpo": ("orpo", {"beta": 0.5, "temperature": 1.5}, PAIRS),
    "kto": ("kto", {"desirable_weight": 1.2, "undesirable_weight": 0.7, "temperature": 0.9}, JUDGED),
    "grpo-token": ("grpo", {"clip_low": 0.1, "clip_high": 0.3}, OLD),
    "grpo-token-kl": ("grpo", {"kl": 0.3, "temperature": 0.8}, OLD_AND_REFERENCE),
    "grpo-sequence": ("grpo", {"normalisation": "sequence", "kl": 0.1}, OLD_AND_REFERENCE),
    "grpo-length": ("grpo", {"normalisation": "length", "max_length": 16, "soft_cap": 3.0}, OLD),
    "gspo": ("grpo", {"ratio": "sequence", "normalisation": "sequence", "kl": 0.2}, OLD_AND_REFERENCE),
    "gspo-token": ("grpo", {"ratio": "sequence", "clip_high": 0.5}, OLD),
    "gspo-length": ("grpo", {"ratio": "sequence", "normalisation": "length", "max_length": 9}, OLD),
    "ppo": ("ppo", {"entropy_coefficient": 0.1, "temperature": 0.8, "soft_cap": 4.0}, {"row": (*VALUED, "old_values")}),
    "ppo-unclipped": ("ppo", {"value_clip": None}, {"row": VALUED}),
}


@pytest.mark.parametrize("case", CASES)
def test_objective_keeps_its_promises_and_equals_its_formula(case):
    name, options, leaves = CASES[case]
    assert_streams_objective(
        getattr(objectives, name)(**options),
        partial(make_batch, **leaves),
        VOCABULARY,
        make_output=logits_and_values if name == "ppo" else None,
        dense=partial(getattr(dense, name), **options),
        max_examples=settings.default.max_examples // 2,
    )


def test_every_objective_has_a_case():
    functions = {name for name in objectives.__all__ if name.islower()} - {"weighted_mean"}
    assert functions == {name for name, _, _ in CASES.values()}
