"""Adapters on a small decoder: it can add, and learns to multiply with a seventh as many new numbers.

The decoder of `arithmetic.py` is trained on all 100 one-digit sums. Then low-rank adapters (LoRA, arXiv 2106.09685)
learn the 100 products, while every weight of the decoder is frozen: gradients, optimizer state and what is to be saved
are the adapters' alone. Without the adapters the decoder adds as before, since its weights have the bits that they had.
Merged into copies of the weights, the adapters cost nothing when the model answers.
Takes about half a minute: `python examples/lora.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import arithmetic
import torch

from rpfunc import Model, State, generate, optim, random, train_steps, tree
from rpfunc.models import decoder, lora
from rpfunc.objectives import sft

PLAIN = decoder.model(arithmetic.CONFIG)
SUMS = [f"{a}+{b}=" for a in range(10) for b in range(10)]
PRODUCTS = [f"{a}*{b}=" for a in range(10) for b in range(10)]


@dataclass(frozen=True)
class Options:
    """What a run depends on; every random number comes from `seed`."""

    seed: int = 0
    sum_steps: int = 350
    """Steps that train the decoder itself, on sums."""
    product_steps: int = 250
    """Steps that train adapters, on products."""
    rank: int = 6
    learning_rate: float = 5e-3


@dataclass(frozen=True)
class Measured:
    """Fractions of right answers, and how many numbers are trained of how many there are."""

    sums_without: float
    products_without: float
    products_with: float
    products_merged: float
    trained: int
    frozen: int


def answer(prompt: str) -> str:
    """Returns what should follow the prompt: "54" and a newline after "9*6="."""
    left, right = prompt.removesuffix("=").split("*")
    return f"{int(left) * int(right)}\n"


def right(model: Model, params: Any, prompts: Sequence[str], answers: Sequence[str]) -> float:
    """Returns the fraction of the prompts that the likeliest tokens answer rightly."""
    tokens = [list(prompt.encode()) for prompt in prompts]
    texts = generate(model, params, tokens, arithmetic.COMPLETION, stop=b"\n")
    found = [bytes(text.tolist()).decode() for text in texts]
    return sum(map(str.__eq__, found, answers)) / len(answers)


def main(options: Options = Options()) -> Measured:
    """Runs the example; returns what was measured."""
    key = random.key(options.seed)
    initial = decoder.init(arithmetic.CONFIG, random.fold_in(key, "parameters"))
    plain = arithmetic.warm_up(PLAIN, initial, SUMS, random.fold_in(key, "sums"), options.sum_steps)

    config = lora.LoraConfig(("attention.*", "mlp.*"), rank=options.rank, alpha=2.0 * options.rank)
    model, params = lora.adapt(PLAIN, plain, config, random.fold_in(key, "adapters"))
    optimizer = optim.adam(optim.linear(options.learning_rate, 0.0, options.product_steps))
    drawing = random.fold_in(key, "products")
    drawn = (arithmetic.draw(random.fold_in(drawing, step), PRODUCTS, 40) for step in range(options.product_steps))
    batches = (arithmetic.labelled(prompts, list(map(answer, prompts))) for prompts in drawn)
    start = State.create(params, optimizer, lora.frozen)
    steps = train_steps(start, batches, model=model, objective=sft(), optimizer=optimizer, frozen=lora.frozen)
    for state, result in steps:
        params = state.params
        if result.step % 50 == 0:
            print(f"step {result.step}: loss {result.loss.item():.3f}")

    kept, adapters = lora.split(params)
    assert all(torch.equal(*pair) for pair in zip(tree.leaves(kept), tree.leaves(plain), strict=True))
    sums, products = [arithmetic.right_answer(prompt) for prompt in SUMS], [answer(prompt) for prompt in PRODUCTS]
    measured = Measured(
        sums_without=right(PLAIN, kept, SUMS, sums),
        products_without=right(PLAIN, kept, PRODUCTS, products),
        products_with=right(model, params, PRODUCTS, products),
        products_merged=right(*lora.merge(model, params), PRODUCTS, products),
        trained=sum(leaf.numel() for leaf in tree.leaves(adapters)),
        frozen=sum(leaf.numel() for leaf in tree.leaves(kept)),
    )
    print(f"{measured.trained:,} numbers trained, {measured.frozen:,} frozen")
    print(f"products right: {measured.products_with:.0%} with adapters, {measured.products_merged:.0%} merged")
    print(f"without them: {measured.products_without:.0%} of products right, {measured.sums_without:.0%} of sums")
    return measured


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is tiny; and so results do not depend on the number of cores
    main()
