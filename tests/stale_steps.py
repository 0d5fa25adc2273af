"""Asynchronous training of models so small that every number can be told by hand."""

import math

import torch

from rpfunc import Batch, Layer, Model, State, train_steps
from rpfunc.objectives import Objective
from rpfunc.stream import rowwise


def summed():
    """The loss is the sum of outputs over the number of examples whose `valid` is not 0."""
    return Objective(
        "sum",
        lambda batch: batch,
        lambda batch: (batch.row["valid"] != 0).sum().double(),
        lambda output, batch: output,
        lambda sums, batch, total: (sums / torch.where(total == 0, 1.0, total)).sum() * (total != 0),
    )


def data(values, valid=1.0, dtype=torch.float64):
    x = torch.tensor(values, dtype=dtype).reshape(-1, 1)
    return Batch(row={"x": x, "valid": torch.full_like(x, valid)})


def steps(state, batches, optimizer, model, **options):
    options = {"asynchronous": True, **options}
    return train_steps(state, batches, model=model, objective=summed(), optimizer=optimizer, **options)


def collect(states, running):
    """Appends each state that is yielded, until something raises."""
    for state, _ in running:
        states.append(state)


def squared(broken=lambda batch: False):
    """x · p², so that the gradient, 2 x p, tells which p it was taken at."""

    def layer(p, x, batch):
        if broken(batch):
            raise BrokenError("layer")
        return batch.row["x"] * p * p

    last = Layer("last", rowwise(lambda p, x, batch: x + 0.0 * p), "b")
    return Model((Layer("first", rowwise(layer), "a"), last))


class BrokenError(Exception):
    """What no code but this test's raises."""


def start(optimizer, p=1.0, dtype=torch.float64):
    return State.create({"a": torch.tensor(p, dtype=dtype), "b": torch.tensor(0.0, dtype=dtype)}, optimizer)


def by_hand(p, kinds, asynchronous, momentum=0.0, rate=0.125):
    """p[0], p[1] ... of SGD on the mean of x p², in Python's own numbers, all of them exact; and who was skipped."""
    reached, sum_of_gradients, skipped = [p], 0.0, []
    for number, kind in enumerate(kinds):
        at = reached[max(0, number - asynchronous)]
        skipped.append(kind == "empty" or not math.isfinite(kind))
        if not skipped[-1]:
            sum_of_gradients = momentum * sum_of_gradients + 2 * kind * at
            reached.append(reached[-1] - rate * sum_of_gradients)
        else:
            reached.append(reached[-1])
    return reached, skipped


def batch_of(kind):
    return data([1.0], valid=0.0) if kind == "empty" else data([kind])
