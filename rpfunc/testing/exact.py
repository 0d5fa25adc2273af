"""Models whose arithmetic is exact: small integers in float64 through layers that are piecewise polynomials.

Linear maps, relu, square and attention without softmax, (q·k masked) v, take integers to integers; objectives divide
by a power of two. As long as nothing passes 2^53 (see `largest`) no operation rounds, so that sums may be taken in any
order and every exact way of computing a gradient gives *equal* tensors.
Shapes: B batch, T rows, W width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.model import Form, Layer, Model
from rpfunc.objectives.objective import Objective
from rpfunc.reference import value_and_grad
from rpfunc.stream import attending, opaque, rowwise

WIDTH, VOCABULARY = 2, 3
KINDS = ("linear", "relu", "square", "causal", "bidirectional", "opaque")
"""What may stand between embedding and head. One `causal` or `bidirectional` and one `square` stay below 2^53."""


def model(kinds: tuple[str, ...] = ("square", "causal"), *, tied: bool = True) -> Model:
    """Returns layers `embedding`, one for each of `kinds`, `head` (the embedding's table, if tied)."""
    body = [Layer(f"{kind}{index}", _FORMS[kind], f"{kind}{index}") for index, kind in enumerate(kinds)]
    head = Layer("head", rowwise(_head), "embedding" if tied else "head")
    return Model((Layer("embedding", rowwise(_embed), "embedding"), *body, head))


def init(kinds: tuple[str, ...] = ("square", "causal"), *, tied: bool = True, seed: int = 0) -> dict[str, Any]:
    """Returns float64 parameters drawn from {-1, 0, 1}."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).double()

    params: dict[str, Any] = {"embedding": draw(VOCABULARY, WIDTH)}
    if not tied:
        params["head"] = draw(VOCABULARY, WIDTH)
    for index, kind in enumerate(kinds):
        names = ("query", "key", "value") if kind in ("causal", "bidirectional") else ("weight",)
        subtree = {name: draw(WIDTH, WIDTH) for name in names}
        params[f"{kind}{index}"] = subtree | ({} if len(names) > 1 else {"bias": draw(WIDTH)})
    return params


def batch(num_examples: int, num_rows: int, *, seed: int = 0, group_size: int = 1) -> Batch:
    """Returns tokens and labels (B, T), and an integer weight for each example."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, VOCABULARY, (2, num_examples, num_rows), generator=generator)
    weight = torch.randint(-1, 2, (num_examples,), generator=generator).double()
    return Batch(row={"tokens": tokens, "labels": labels}, example={"weight": weight}, group_size=group_size)


def linear() -> Objective:
    """Returns Σ weight · Σ_t logit[label] / N, with N the least power of two that holds all rows."""
    return Objective("exact_linear", lambda batch: batch, _power_of_two, _score, _weighted)


def squared() -> Objective:
    """Returns Σ over examples of (Σ_t logit[label])² / N: not linear in the sums, so it takes two passes."""
    return Objective("exact_squared", lambda batch: batch, _power_of_two, _score, _squares, linear=False)


def paired() -> Objective:
    """Returns Σ over pairs of examples of (s_first - s_second)² / N, for batches of group_size 2."""
    return Objective("exact_paired", lambda batch: batch, _power_of_two, _score, _pairs, linear=False)


def largest(model: Model, objective: Objective, params: Any, batch: Batch) -> float:
    """Returns a bound on every number, times N, that any exact way of computing the gradient meets.

    All parameters and weights are put to 1, the largest that they can be. No value or cotangent is then below 1 or
    cancelled, and each is a factor in some term of a gradient, so the largest gradient or loss bounds them all.
    """
    ones = tree.map(torch.ones_like, dict(params))
    positive = Batch(row=batch.row, example=tree.map(torch.ones_like, batch.example), group_size=batch.group_size)
    upper = Objective("upper", objective.prepare, objective.total, objective.score, _sums_squared)
    loss, grads = value_and_grad(model, objective if objective.linear else upper)(ones, positive)
    most = max(float(loss), *(float(leaf.max()) for leaf in tree.leaves(grads)))
    return most * float(objective.total(batch))


def _embed(table: Tensor, x: Any, batch: Batch) -> Tensor:
    del x
    tokens = batch.row["tokens"]
    # the factor depends on absolute places, so that a piece that forgets where it stands is found out
    examples = torch.arange(batch.first_example, batch.first_example + tokens.shape[0]).unsqueeze(1)
    rows = torch.arange(batch.first_row, batch.first_row + tokens.shape[1])
    factor = 1 + ((examples + rows) % 3 == 1).to(table.dtype)
    return F.embedding(tokens, table) * factor.unsqueeze(-1)


def _head(table: Tensor, x: Tensor, batch: Batch) -> Tensor:
    del batch
    return x @ table.mT


def _affine(params: dict[str, Tensor], x: Tensor, batch: Batch) -> Tensor:
    del batch
    return x @ params["weight"].mT + params["bias"]


def _relu(params: dict[str, Tensor], x: Tensor, batch: Batch) -> Tensor:
    return torch.relu(_affine(params, x, batch))


def _square(params: dict[str, Tensor], x: Tensor, batch: Batch) -> Tensor:
    return _affine(params, x, batch).square()


def _mixed(params: dict[str, Tensor], x: Tensor, batch: Batch) -> Tensor:
    """Sums over all rows: nothing that streams."""
    return _affine(params, x, batch) + x.sum(dim=1, keepdim=True)


def _key_value(params: dict[str, Tensor], x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    del batch
    return x @ params["key"].mT, x @ params["value"].mT


def _causal(params: dict[str, Tensor], x: Tensor, kv: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    key, value = kv
    scores = (x @ params["query"].mT) @ key.mT
    return x + scores.tril(key.shape[1] - x.shape[1]) @ value


def _bidirectional(params: dict[str, Tensor], x: Tensor, kv: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    del batch
    key, value = kv
    return x + ((x @ params["query"].mT) @ key.mT) @ value


_FORMS: dict[str, Form] = {
    "linear": rowwise(_affine),
    "relu": rowwise(_relu),
    "square": rowwise(_square),
    "causal": attending(_key_value, _causal),
    "bidirectional": attending(_key_value, _bidirectional, causal=False),
    "opaque": opaque(_mixed),
}


def _power_of_two(batch: Batch) -> Tensor:
    return torch.tensor(float(1 << (batch.num_examples * batch.num_rows - 1).bit_length()), dtype=torch.float64)


def _score(logits: Tensor, batch: Batch) -> Tensor:
    labels: Tensor = batch.row["labels"]
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _weighted(sums: Tensor, batch: Batch, total: Tensor) -> Tensor:
    weight: Tensor = batch.example["weight"]
    return (sums * weight).sum() / total


def _squares(sums: Tensor, batch: Batch, total: Tensor) -> Tensor:
    weight: Tensor = batch.example["weight"]
    return (sums.square() * weight).sum() / total


def _pairs(sums: Tensor, batch: Batch, total: Tensor) -> Tensor:
    weight: Tensor = batch.example["weight"]
    return ((sums[::2] - sums[1::2]).square() * weight[::2]).sum() / total


def _sums_squared(sums: Tensor, batch: Batch, total: Tensor) -> Tensor:
    return 2 * sums.square().sum() / total
