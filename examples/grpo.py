"""GRPO on one-digit sums: a policy that is mostly wrong learns from a verifier's reward alone.

A small decoder first sees the right answers of 60 of the 100 sums, for so few steps that half of what it samples there
is wrong. Then it samples groups of answers to those 60 and to 20 new sums; a verifier says which are right; GRPO (arXiv
2402.03300) makes an answer likelier where it did better than its group. Nobody ever shows the policy an answer to the
new sums. The last 20 sums are held out from both, and show that what is learnt is mostly the sums asked, not to add.
Takes one to two minutes on two cores: `python examples/grpo.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import arithmetic
import torch
from torch import Tensor

from rpfunc import Batch, Runtime, State, logprobs, optim, random, train_steps
from rpfunc.models import decoder
from rpfunc.objectives import grpo
from rpfunc.runtime import Cpu

MODEL = decoder.model(arithmetic.CONFIG)
OBJECTIVE = grpo(clip_low=0.2, clip_high=0.28)


@dataclass(frozen=True)
class Options:
    """What a run depends on; every random number comes from `seed`."""

    seed: int = 0
    warm_up_steps: int = 60
    rollouts: int = 45
    prompts: int = 20
    """Prompts of a rollout."""
    group: int = 16
    """Completions of each prompt, compared with each other."""
    updates: int = 4
    """Gradient steps on each rollout: after the first, the policy is no longer the one that sampled."""
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class Measured:
    """How a policy does on some prompts: mean reward of 8 samples each at temperature 1, and greedy accuracy."""

    reward: float
    accuracy: float


def rewards_of(prompts: Sequence[str], completions: Sequence[str]) -> Tensor:
    """Returns the verifier's rewards."""
    return torch.tensor([arithmetic.verify(*answered) for answered in zip(prompts, completions, strict=True)])


def roll_out(params: Any, prompts: Sequence[str], group: int, key: random.Key) -> tuple[Batch, float]:
    """Returns (what GRPO learns from, the mean reward) of `group` completions of each prompt."""
    repeated = [prompt for prompt in prompts for _ in range(group)]
    completions = arithmetic.complete(MODEL, params, repeated, key)
    rewards = rewards_of(repeated, completions).reshape(-1, group)
    # Better or worse than the group, in its deviations; a group that is all right or all wrong teaches nothing.
    deviations = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    sampled = arithmetic.labelled(repeated, completions)
    # Before the first update: the ratio that GRPO clips is against the policy that sampled.
    old = logprobs(MODEL, params, sampled)
    batch = Batch(row={**sampled.row, "old_logprobs": old}, example={"advantages": deviations.flatten()})
    return batch, rewards.mean().item()


def measure(params: Any, prompts: Sequence[str], key: random.Key) -> Measured:
    """Returns how the policy does on the prompts; with one key before and after, the noise is the same."""
    repeated = list(prompts) * 8
    completions = arithmetic.complete(MODEL, params, repeated, key)
    return Measured(rewards_of(repeated, completions).mean().item(), arithmetic.greedy_accuracy(MODEL, params, prompts))


def main(options: Options = Options()) -> tuple[dict[str, Measured], dict[str, Measured]]:
    """Runs the example; returns what was measured before and after GRPO, for each kind of sum."""
    key = random.key(options.seed)
    seen, held_out = arithmetic.split_prompts(random.fold_in(key, "split"), held_out=20)
    shown, new = seen[:60], seen[60:]
    kinds = {"shown, then rewarded": shown, "only rewarded": new, "held out": held_out}
    initial = decoder.init(arithmetic.CONFIG, random.fold_in(key, "parameters"))
    params = arithmetic.warm_up(MODEL, initial, shown, random.fold_in(key, "warm-up"), options.warm_up_steps)
    looking = random.fold_in(key, "measure")
    before = {kind: measure(params, prompts, looking) for kind, prompts in kinds.items()}

    rate = optim.linear(options.learning_rate, options.learning_rate / 5, options.rollouts * options.updates)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adam(rate))
    state = State.create(params, optimizer)
    recent: list[float] = []
    with Runtime([Cpu(), Cpu()]) as runtime:  # two worker threads, kept from one rollout to the next
        for index in range(options.rollouts):
            drawing, sampling = random.split(random.fold_in(key, f"rollout {index}"))
            prompts = arithmetic.draw(drawing, seen, options.prompts)
            batch, reward = roll_out(state.params, prompts, options.group, sampling)
            # Steps run ahead of the loop that reads them, so each rollout has its own: sampling needs the last update.
            steps = train_steps(
                state,
                [batch] * options.updates,
                model=MODEL,
                objective=OBJECTIVE,
                optimizer=optimizer,
                workers=runtime,
                **arithmetic.EXECUTION,
            )
            state = arithmetic.last_state(state, steps)
            recent.append(reward)
            if len(recent) == 5:
                print(f"rollout {index + 1:3}: mean reward of the last 5 {sum(recent) / 5:.2f}")
                recent.clear()

    after = {kind: measure(state.params, prompts, looking) for kind, prompts in kinds.items()}
    for kind, prompts in kinds.items():
        print(
            f"{len(prompts)} sums {kind}: sampled reward {before[kind].reward:.2f} -> {after[kind].reward:.2f}, "
            f"greedy answers right {before[kind].accuracy:.0%} -> {after[kind].accuracy:.0%}"
        )
    return before, after


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are tiny; and so results do not depend on the number of cores
    main()
