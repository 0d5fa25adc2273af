"""DPO on one-digit sums: a policy learns to prefer right answers to its own wrong ones.

A small decoder first sees the right answers of 80 of the 100 sums, for too few steps to know them. It then answers each
a few times; every answer that the verifier finds wrong becomes the rejected half of a pair, with the right answer
chosen. DPO (arXiv 2305.18290) widens the margin between the two, measured against the frozen policy that answered.
The other 20 sums are held out, and stay as hard: what is learnt is which answers to give to the sums asked, not to add.
Takes under a minute on two cores: `python examples/dpo.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import arithmetic
import torch
from torch import Tensor

from rpfunc import Batch, State, logprobs, optim, random, train_steps
from rpfunc.models import decoder
from rpfunc.objectives import dpo
from rpfunc.runtime import Cpu

MODEL = decoder.model(arithmetic.CONFIG)
BETA = 0.2
OBJECTIVE = dpo(beta=BETA)


@dataclass(frozen=True)
class Options:
    """What a run depends on; every random number comes from `seed`."""

    seed: int = 0
    warm_up_steps: int = 60
    steps: int = 120
    pairs: int = 32
    """Pairs of a step."""
    answers: int = 32
    """Answers to each prompt that pairs are made of: with few, most mistakes are in no pair, and what DPO takes from
    rejected ones goes to those instead of to the right answer."""
    learning_rate: float = 3e-4


@dataclass(frozen=True)
class Measured:
    """How a policy does on some prompts: greedy accuracy, and the mean reward margin over their pairs."""

    accuracy: float
    margin: float


def make_pairs(reference: Any, prompts: Sequence[str], answers: int, key: random.Key) -> Batch:
    """Returns a batch of all pairs (right answer, a wrong one that the reference policy gave), with its log-probs.

    `group_size` 2 keeps chosen and rejected together, whatever the batch is cut into. The reference is never needed
    again: all that DPO asks of it is one number for each completion.
    """
    asked = [prompt for prompt in prompts for _ in range(answers)]
    answered = arithmetic.complete(MODEL, reference, asked, key)
    wrong = [
        (prompt, answer)
        for prompt, answer in zip(asked, answered, strict=True)
        if not arithmetic.verify(prompt, answer)
    ]
    completions = [text for prompt, answer in wrong for text in (arithmetic.right_answer(prompt), answer)]
    batch = arithmetic.labelled([prompt for prompt, _ in wrong for _ in range(2)], completions, group_size=2)
    return replace(batch, example={"reference_logprobs": logprobs(MODEL, reference, batch).sum(1)})


def draw_pairs(pairs: Batch, num: int, key: random.Key) -> Batch:
    """Returns `num` pairs drawn from all of them, with replacement."""
    first = 2 * (random.uniform(key, (num, 1), torch.float64) * (pairs.num_examples // 2)).long()
    places = (first + torch.tensor([0, 1])).flatten()
    return pairs.map(lambda leaf: leaf[places])


def margins(params: Any, pairs: Batch) -> Tensor:
    """Returns each pair's reward margin: by how much DPO's implicit reward, β log π/π_ref, prefers the right answer."""
    rewards = BETA * (logprobs(MODEL, params, pairs).sum(1) - pairs.example["reference_logprobs"])
    return rewards[0::2] - rewards[1::2]


def main(options: Options = Options()) -> tuple[dict[str, Measured], dict[str, Measured]]:
    """Runs the example; returns what was measured before and after DPO, on trained and on held-out sums."""
    key = random.key(options.seed)
    train, held_out = arithmetic.split_prompts(random.fold_in(key, "split"), held_out=20)
    initial = decoder.init(arithmetic.CONFIG, random.fold_in(key, "parameters"))
    reference = arithmetic.warm_up(MODEL, initial, train, random.fold_in(key, "warm-up"), options.warm_up_steps)

    prompts = {"trained": train, "held out": held_out}
    pairs = {
        name: make_pairs(reference, some, options.answers, random.fold_in(key, f"pairs, {name}"))
        for name, some in prompts.items()
    }

    def measure(params: Any) -> dict[str, Measured]:
        return {
            name: Measured(
                arithmetic.greedy_accuracy(MODEL, params, prompts[name]), margins(params, pairs[name]).mean().item()
            )
            for name in prompts
        }

    before = measure(reference)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adam(options.learning_rate))
    drawing = random.fold_in(key, "draw")
    batches = (
        draw_pairs(pairs["trained"], options.pairs, random.fold_in(drawing, step)) for step in range(options.steps)
    )
    state = State.create(reference, optimizer)
    steps = train_steps(
        state,
        batches,
        model=MODEL,
        objective=OBJECTIVE,
        optimizer=optimizer,
        workers=[Cpu(), Cpu()],
        **arithmetic.EXECUTION,
    )
    for state, result in steps:
        if state.step % 20 == 0:
            print(f"step {state.step:3}: DPO loss {result.loss.item():.3f}, gradient norm {result.grad_norm:.2f}")
    after = measure(state.params)

    for name, some in prompts.items():
        print(
            f"{len(some)} {name} sums: greedy answers right {before[name].accuracy:.0%} -> {after[name].accuracy:.0%}, "
            f"mean reward margin over {pairs[name].num_examples // 2} pairs "
            f"{before[name].margin:.2f} -> {after[name].margin:.2f}"
        )
    return before, after


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are tiny; and so results do not depend on the number of cores
    main()
