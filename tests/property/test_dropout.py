"""Dropout is drawn by example, layer and row: no cut, order or recomputation changes the mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, Layer, Model, Plan, random, value_and_grad
from rpfunc.models import decoder
from rpfunc.objectives import Objective, sft
from rpfunc.stream import opaque, rowwise
from rpfunc.testing import assert_computes, assert_equal_bits, strategies

SIZE = 4096
PLANS = [Plan.parse(text) for text in ("X0:3", "F0:1 F1:2 X2:3 B0:1 B1:2", "F0:2 X2:3 B0:2", "F0:2 X2:3 B0:1 B1:2")]


def dropping(batch, x):
    return random.dropout(x, 0.5, batch.constant["key"], batch)


def times_weight(weight, x, batch):
    return batch.row["x"] * weight


def model_with_dropout_at(place):
    """Three layers, y = dropout(x · w), the dropout in layer `place`, the others identities beside the product."""

    def layer(index):
        def function(params, x, batch):
            x = times_weight(params, x, batch) if index == 0 else x
            return dropping(batch, x) if index == place else x

        return Layer(f"layer{index}", rowwise(function), "w" if index == 0 else ())

    return Model(tuple(map(layer, range(3))))


def plain_sum():
    return Objective(
        "plain_sum",
        prepare=lambda batch: batch,
        total=lambda batch: torch.tensor(1.0, dtype=torch.float64),
        score=lambda output, batch: output.sum(-1),
        loss=lambda sums, batch, total: sums.sum() / total,
    )


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_gradient_belongs_to_the_mask_of_the_forward(place, plan, recompute):
    """The gradient of Σ dropout(x · w) by w, at x = w = 1, is Σ dropout(x · w) itself, element by element."""
    batch = Batch(row={"x": torch.ones(4, 1, SIZE)}, constant={"key": random.key(3)})
    model, params = model_with_dropout_at(place), {"w": torch.ones(SIZE)}
    outputs = model(params, batch)
    function = value_and_grad(model, plain_sum(), plan=plan, workers=2, microbatches=4, recompute=recompute)
    result, grads = function(params, batch)
    assert torch.equal(grads["w"], outputs.sum((0, 1)))
    assert result.loss == outputs.sum()
    zeros = (outputs == 0).double().mean(dim=(1, 2))
    assert ((zeros - 0.5).abs() < 0.05).all()
    assert not torch.equal(outputs[0], outputs[1])


@given(st.data())
def test_any_piece_of_a_batch_sees_its_part_of_the_mask(data):
    num_examples, num_rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    x = torch.ones(num_examples, num_rows, 3, 2)
    batch = Batch(row={"x": x})
    key = random.key(0)
    whole = random.dropout(x, 0.5, key, batch)
    first = data.draw(st.integers(0, num_examples - 1))
    last = data.draw(st.integers(first + 1, num_examples))
    start = data.draw(st.integers(0, num_rows - 1))
    stop = data.draw(st.integers(start + 1, num_rows))
    piece = batch.examples(first, last).rows(start, stop)
    assert torch.equal(random.dropout(piece.row["x"], 0.5, key, piece), whole[first:last, start:stop])


@pytest.mark.parametrize("chunk", [None, 1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_decoders_with_dropout_compute_one_function(num_microbatches, chunk):
    config = decoder.DecoderConfig(
        vocabulary=5, width=4, layers=1, heads=2, kv_heads=2, head_size=2, mlp_width=4, dropout=0.5
    )
    tokens = torch.randint(0, 5, (3, 4), generator=torch.Generator().manual_seed(0))
    batch = Batch(row={"tokens": tokens, "labels": tokens}, constant={"key": random.key(1)})
    params = decoder.init(config, random.key(0), torch.float64)
    function = value_and_grad(decoder.model(config), sft(), microbatches=num_microbatches, chunk=chunk, workers=2)
    assert_computes(function, decoder.model(config), sft(), params, batch, tolerance=1e-10)


def test_the_seed_alone_decides_the_bits_whatever_the_workers():
    batch = Batch(row={"x": torch.ones(4, 1, SIZE)}, constant={"key": random.key(5)})
    results = []
    for workers in (None, 1, 2, 3, 4):
        function = value_and_grad(model_with_dropout_at(1), plain_sum(), plan=PLANS[1], workers=workers, microbatches=4)
        result, grads = function({"w": torch.ones(SIZE)}, batch)
        results.append({"loss": result.loss, **grads})
    for found in results[1:]:
        assert_equal_bits(found, results[0])


def test_another_key_draws_another_mask():
    batch = Batch(row={"x": torch.ones(1, 1, SIZE)})
    masks = [random.dropout(batch.row["x"], 0.5, random.key(seed), batch) for seed in range(2)]
    assert 0.4 < (masks[0] == masks[1]).double().mean() < 0.6


@given(strategies.chunks(3))
def test_an_opaque_layer_draws_the_same_mask_as_a_rowwise_one(chunk):
    batch = Batch(row={"x": torch.ones(2, 3, 4)}, constant={"key": random.key(0)})
    grads = []
    for form in (rowwise, opaque):
        model = Model((Layer("only", form(lambda w, x, batch: dropping(batch, times_weight(w, x, batch))), "w"),))
        grads.append(value_and_grad(model, plain_sum(), chunk=chunk)({"w": torch.ones(4)}, batch)[1])
    assert torch.equal(grads[0]["w"], grads[1]["w"])
