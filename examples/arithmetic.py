"""One-digit sums as bytes: the task that `dpo.py` and `grpo.py` share, and the policy that they start from.

The prompt "3+4=" wants the answer "7" and a newline. A token is a byte. Every prompt has 4 tokens, so prompts never
need padding; a completion is an answer up to its newline, at most 3 tokens, and is padded on the right. Prompts and
padding have no label: they are read, but never predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from rpfunc import Batch, Model, Plan, State, StepResult, optim, random, train_steps
from rpfunc.models.decoder import DecoderConfig
from rpfunc.objectives import IGNORED, sft

CONFIG = DecoderConfig(
    vocabulary=64,  # digits, "+", "=" and newline are bytes below 64
    width=64,
    layers=2,
    deviation=None,
    heads=4,
    kv_heads=2,
    head_size=16,
    mlp_width=192,
)

EXECUTION: dict[str, Any] = {"plan": Plan.parse("F0:2 X2:4 B0:2"), "microbatches": 2, "chunk": 4}
"""How gradients are taken: embedding and first block as one stage, second block and head as another; half of the
examples at a time; 4 rows at a time. No choice here changes a gradient by more than rounding."""

COMPLETION = 3
"""Tokens that a completion may have: two digits and a newline."""


def split_prompts(key: random.Key, held_out: int) -> tuple[list[str], list[str]]:
    """Returns the prompts of all 100 sums, in two parts: those to train on, and `held_out` of them never trained on."""
    prompts = draw(key, [f"{a}+{b}=" for a in range(10) for b in range(10)], 100)
    return prompts[held_out:], prompts[:held_out]


def draw(key: random.Key, prompts: Sequence[str], num: int) -> list[str]:
    """Returns `num` different ones of the prompts, in random order."""
    order = random.uniform(key, (len(prompts),), torch.float64).argsort()
    return [prompts[index] for index in order[:num].tolist()]


def right_answer(prompt: str) -> str:
    """Returns what should follow the prompt: "13" and a newline after "9+4="."""
    left, right = prompt.removesuffix("=").split("+")
    return f"{int(left) + int(right)}\n"


def verify(prompt: str, completion: str) -> float:
    """Returns 1 for the right answer and 0 for any other; an answer that does not end is wrong."""
    return float(completion == right_answer(prompt))


def labelled(prompts: Sequence[str], completions: Sequence[str], **options: Any) -> Batch:
    """Returns the batch with row leaves `tokens` and `labels`: the completions' own tokens are labels, nothing else is.

    The other arguments are those of `Batch`.
    """
    rows = max(map(len, prompts)) + COMPLETION
    tokens = torch.zeros(len(prompts), rows, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORED)
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        text = torch.tensor(list((prompt + completion).encode()))
        tokens[index, : len(text)] = text
        labels[index, len(prompt) : len(text)] = text[len(prompt) :]
    return Batch(row={"tokens": tokens, "labels": labels}, **options)


def complete(model: Model, params: Any, prompts: Sequence[str], key: random.Key | None = None) -> list[str]:
    """Returns a completion of each prompt, drawn at temperature 1, or the likeliest tokens where there is no key.

    All prompts have one length, so the batch grows by a token at a time, without padding or a mask. Each token runs
    the whole model anew: on so few rows, keeping keys and values would not pay.
    """
    tokens = torch.tensor([list(prompt.encode()) for prompt in prompts])
    for place in range(COMPLETION):
        with torch.no_grad():
            logits: Tensor = model(params, Batch(row={"tokens": tokens}))[:, -1]
        # a place's own key: no two tokens of a rollout share their noise
        token = logits.argmax(dim=-1) if key is None else random.categorical(random.fold_in(key, place), logits)
        tokens = torch.cat((tokens, token.unsqueeze(1)), dim=1)
    texts = [bytes(row).decode() for row in tokens[:, -COMPLETION:].tolist()]
    return ["".join(text.partition("\n")[:2]) for text in texts]  # what comes after the newline is no part of it


def greedy_accuracy(model: Model, params: Any, prompts: Sequence[str]) -> float:
    """Returns the fraction of the prompts whose likeliest completion is the right answer."""
    completions = complete(model, params, prompts)
    return sum(map(verify, prompts, completions)) / len(prompts)


def warm_up(model: Model, params: Any, prompts: Sequence[str], key: random.Key, steps: int) -> dict[str, Any]:
    """Returns parameters after `steps` steps of supervised fine-tuning on right answers, too few to get all right."""
    optimizer = optim.adamw(2e-3, weight_decay=0.1)
    drawn = (draw(random.fold_in(key, step), prompts, 40) for step in range(steps))
    batches = (labelled(some, [right_answer(prompt) for prompt in some]) for some in drawn)
    start = State.create(params, optimizer)
    end = last_state(start, train_steps(start, batches, model=model, objective=sft(), optimizer=optimizer))
    return dict(end.params)


def last_state(state: State, steps: Iterable[tuple[State, StepResult]]) -> State:
    """Runs the steps; returns the state after the last, or the one given where there is none."""
    return reduce(lambda _, step: step[0], steps, state)
