"""Layers whose outputs share memory with their inputs, or with each other, are differentiated right all the same.

Cotangents are donated and overwritten between layers, so whatever a pullback returns must be nobody else's memory.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc import Batch, Layer, Model, value_and_grad
from rpfunc.objectives import Objective
from rpfunc.stream import attending, opaque, rowwise
from rpfunc.testing import assert_computes, assert_streams, strategies

ROWS = 6
HAZARDS = {
    "identity": lambda params, x, batch: x,
    "swap": lambda params, x, batch: (x[1], x[0]),
    "sum": lambda params, x, batch: (x[0] + x[1], x[1]),
    "sum of one leaf twice": lambda params, x, batch: (x[0] + x[0], x[1]),
    "one leaf twice": lambda params, x, batch: (x[0], x[0]),
    "drops a leaf": lambda params, x, batch: (x[0] * 2, torch.zeros_like(x[0])),
    "expand": lambda params, x, batch: (x[0].sum(-1, keepdim=True).expand_as(x[0]), x[1]),
    "flip": lambda params, x, batch: (x[0].flip(-1), x[1].mT.mT),
    "transpose": lambda params, x, batch: (x[0].mT.contiguous().mT, x[1]),
    "parameter added": lambda params, x, batch: (x[0] + params, x[1] + params),
    "parameter alone": lambda params, x, batch: (x[0], params.expand_as(x[1])),
    "slices": lambda params, x, batch: tuple(torch.cat(x, -1).split(x[0].shape[-1], -1)),
    "batch leaf": lambda params, x, batch: (x[0], batch.row["features"]),
}


def last(shown, x):
    """The rows of `shown` that a chunk `x` has of its own."""
    return shown[:, -x.shape[1] :]


KV_HAZARDS = {
    "kv is x": (lambda params, x, batch: x, lambda params, x, kv, batch: (x[0] + last(kv[1], x[0]), x[1])),
    "kv twice": (
        lambda params, x, batch: (x[0], x[0]),
        lambda params, x, kv, batch: (last(kv[0].cumsum(1), x[0]), x[1]),
    ),
    "kv unread": (lambda params, x, batch: x[0], lambda params, x, kv, batch: x),
    "rows swap": (lambda params, x, batch: (x[1], x[0]), lambda params, x, kv, batch: (last(kv[0], x[0]), x[0])),
    "kv is a parameter": (
        lambda params, x, batch: params.expand_as(x[0]),
        lambda params, x, kv, batch: (x[0] + last(kv.cumsum(1), x[0]), x[1]),
    ),
}


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (3, 2, ROWS, 2), generator=generator).double()


@pytest.mark.parametrize("name", HAZARDS)
@pytest.mark.parametrize("form", [rowwise, opaque])
def test_an_aliasing_layer_streams_exactly(form, name):
    left, right, features = tensors(0)
    for chunk in (1, 2, 4, ROWS, ROWS + 5):
        params = torch.tensor([2.0, -1.0], dtype=torch.float64)
        batch = Batch(row={"features": features})
        assert_streams(form(HAZARDS[name]), params, (left, right), batch, chunk, seed=chunk)


@pytest.mark.parametrize("name", KV_HAZARDS)
@pytest.mark.parametrize("causal", [True, False])
def test_an_aliasing_attending_layer_streams_exactly(name, causal):
    left, right, features = tensors(1)
    kv, rows = KV_HAZARDS[name]
    if not causal:
        rows = {"kv unread": rows}.get(name, lambda params, x, kv, batch: (x[1], x[0] + sum_of_leaves(kv)))
    for chunk in (1, 2, 4, ROWS, ROWS + 5):
        params = torch.tensor([2.0, -1.0], dtype=torch.float64)
        batch = Batch(row={"features": features})
        assert_streams(attending(kv, rows, causal=causal), params, (left, right), batch, chunk, seed=chunk)


def sum_of_leaves(kv):
    return sum(leaf.sum(1, keepdim=True) for leaf in (kv if isinstance(kv, tuple) else (kv,)))


def source(params, x, batch):
    return batch.row["features"] * params, batch.row["features"]


def product(params, x, batch):
    return x[0] * x[1] + x[0]


def plain_sum():
    return Objective(
        "plain_sum",
        prepare=lambda batch: batch,
        total=lambda batch: torch.tensor(1.0, dtype=torch.float64),
        score=lambda output, batch: output.sum(-1),
        loss=lambda sums, batch, total: sums.sum() / total,
    )


@settings(max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_a_chain_of_aliasing_layers_is_exact(data):
    names = data.draw(st.lists(st.sampled_from(sorted(HAZARDS)), min_size=1, max_size=4), "layers")
    layers = [Layer("source", rowwise(source), "source")]
    for index, name in enumerate(names):
        form = data.draw(st.sampled_from([rowwise, opaque]), "form")
        layers.append(Layer(f"{index}", form(HAZARDS[name]), "shared"))
    layers.append(Layer("product", rowwise(product)))
    model = Model(tuple(layers))
    params = {name: torch.tensor([1.0, -1.0], dtype=torch.float64) for name in ("source", "shared")}
    function = value_and_grad(
        model,
        plain_sum(),
        plan=data.draw(strategies.plans(model.num_layers), "plan"),
        workers=data.draw(strategies.workers(2), "workers"),
        microbatches=data.draw(st.integers(1, 2), "microbatches"),
        chunk=data.draw(strategies.chunks(ROWS), "chunk"),
        recompute=data.draw(st.booleans(), "recompute"),
    )
    assert_computes(function, model, plain_sum(), params, Batch(row={"features": tensors(2)[0]}))


def test_gradients_of_two_calls_share_no_memory():
    model = Model((Layer("source", rowwise(source), "source"), Layer("product", rowwise(product))))
    params = {"source": torch.ones(2, dtype=torch.float64)}
    function = value_and_grad(model, plain_sum(), chunk=2)
    batch = Batch(row={"features": tensors(0)[0]})
    _, first = function(params, batch)
    kept = first["source"].clone()
    _, second = function(params, batch)
    second["source"].zero_()
    assert torch.equal(first["source"], kept)
