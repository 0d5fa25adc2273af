"""Handwritten digits with a small residual network: 1,797 images of 8 x 8 pixels from scikit-learn, no download.

A fifth of the images is held out. Batch norm takes its statistics over the whole batch, so each batch is one
microbatch; for the held-out images the statistics are frozen to those of the training images. `norm="group"` needs
neither, and takes any number of microbatches. The objective is written here: an image has one label and no rows.
About 98% of the held-out digits are right after some ten seconds: `python examples/digits.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from rpfunc import Batch, State, optim, random, train_steps
from rpfunc.models import resnet
from rpfunc.objectives import Objective


@dataclass(frozen=True)
class Options:
    """What a run depends on; every random number comes from `seed`."""

    seed: int = 0
    norm: str = "batch"
    """As in `ResnetConfig`: "batch" or "group"."""
    epochs: int = 15
    examples: int = 96
    """Images of a batch."""
    microbatches: int = 1
    """Runs of a batch's images that go through the network one after the other."""
    learning_rate: float = 1e-2


def classification() -> Objective:
    """Returns the mean cross entropy of logits (B, 1, K) under example leaf `labels` (B,)."""

    def score(logits: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(logits.squeeze(1), batch.example["labels"], reduction="none").unsqueeze(1)

    return Objective(
        "classification",
        prepare=lambda batch: batch,
        total=lambda batch: torch.tensor(batch.num_examples, dtype=torch.float64),
        score=score,
        loss=lambda sums, batch, total: sums.sum() / total,
    )


def digits(key: random.Key) -> tuple[Batch, Batch]:
    """Returns (training images, held-out images), with pixels in [-1, 1], in an order that the key draws."""
    found = load_digits()
    order = random.uniform(key, (len(found.target),), torch.float64).argsort()
    images = torch.tensor(found.images, dtype=torch.float32)[order].unsqueeze(1) / 8 - 1
    whole = Batch(example={"images": images, "labels": torch.tensor(found.target)[order]})
    held_out = whole.num_examples // 5
    return whole.examples(held_out, whole.num_examples), whole.examples(0, held_out)


def batches(train: Batch, key: random.Key, options: Options) -> Iterator[Batch]:
    """Yields the images in a new order each epoch, moved by up to a pixel; the last, smaller batch is left out."""
    for epoch in range(options.epochs):
        drawing = random.fold_in(key, epoch)
        order = random.uniform(random.fold_in(drawing, "order"), (train.num_examples,), torch.float64).argsort()
        moves = (random.uniform(random.fold_in(drawing, "moves"), (train.num_examples, 2)) * 3).long() - 1
        for chosen in order.split(options.examples)[: train.num_examples // options.examples]:
            moved = [
                image.roll(move.tolist(), (1, 2))
                for image, move in zip(train.example["images"][chosen], moves[chosen], strict=True)
            ]
            yield Batch(example={"images": torch.stack(moved), "labels": train.example["labels"][chosen]})


def accuracy(config: resnet.ResnetConfig, params: Any, batch: Batch) -> float:
    """Returns the fraction of the images whose likeliest class is the label."""
    with torch.no_grad():
        logits: Tensor = resnet.model(config)(params, batch)
    return (logits.squeeze(1).argmax(dim=-1) == batch.example["labels"]).double().mean().item()


def main(options: Options = Options()) -> float:
    """Trains and evaluates; returns the accuracy on the held-out images."""
    key = random.key(options.seed)
    train, held_out = digits(random.fold_in(key, "split"))
    config = resnet.ResnetConfig(norm=options.norm)  # type: ignore[arg-type]
    params = resnet.init(config, random.fold_in(key, "parameters"))
    num_steps = options.epochs * (train.num_examples // options.examples)
    optimizer = optim.adamw(optim.linear(options.learning_rate, 0.0, num_steps), weight_decay=0.01)
    steps = train_steps(
        State.create(params, optimizer),
        batches(train, random.fold_in(key, "batches"), options),
        model=resnet.model(config),
        objective=classification(),
        optimizer=optimizer,
        microbatches=options.microbatches,
    )
    per_epoch = num_steps // options.epochs
    for state, result in steps:
        params = state.params
        if result.step % per_epoch == 0:
            print(f"epoch {result.step // per_epoch}: loss {result.loss.item():.3f}")
    if config.norm == "batch":
        config, params = resnet.freeze_statistics(config, params, train)
    right = accuracy(config, params, held_out)
    print(f"{right:.1%} of {held_out.num_examples} held-out digits are right")
    return right


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is tiny; and so results do not depend on the number of cores
    main()
