"""Options of the checks that cannot work, and layers that give nothing to check."""

import math

import pytest
import torch
import torch.nn.functional as F

from rpfunc import Batch, Layer, Model, value_and_grad
from rpfunc.errors import OptionsError
from rpfunc.objectives import Objective, weighted_mean
from rpfunc.stream import Attending, recurrent, rowwise
from rpfunc.testing import assert_computes, assert_streams, exact

X, WEIGHT = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
BATCH = Batch(row={"x": X})
LINEAR = rowwise(lambda weight, x, batch: x @ weight)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"chunk": 0}, "chunk is 0, it must be at least 1"),
        ({"chunk": -1}, "chunk is -1, it must be at least 1"),
        ({"chunk": 2.0}, "chunk is 2.0, it must be a whole number"),
        ({"chunk": True}, "chunk is True, it must be a whole number"),
        ({"draws": 0}, "draws is 0, it must be at least 1"),
        ({"draws": -3}, "draws is -3, it must be at least 1"),
        ({"draws": 2.5}, "draws is 2.5, it must be a whole number"),
        ({"tolerance": math.nan}, "tolerance is nan, it must be from 0, below 1, or None"),
        ({"tolerance": math.inf}, "tolerance is inf, it must be from 0, below 1, or None"),
        ({"tolerance": "1"}, "tolerance is '1', it must be from 0, below 1, or None"),
        ({"draws": 0, "chunk": 0}, "2 problems"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_no_fault_of_the_layer(options, told):
    with pytest.raises(OptionsError) as caught:
        assert_streams(LINEAR, WEIGHT, X, BATCH, **options)
    assert told in str(caught.value)


@pytest.mark.parametrize("layer", [lambda p, x, batch: x, "rowwise", None], ids=["function", "text", "nothing"])
def test_what_is_no_layer(layer):
    with pytest.raises(OptionsError, match="needs a Layer or a form: rowwise"):
        assert_streams(layer, WEIGHT, X, BATCH)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda p, x, batch: None, "returned None, in which there is no tensor; is a `return` missing?"),
        (lambda p, x, batch: {}, "returned {}, in which there is no tensor; is a `return` missing?"),
        (lambda p, x, batch: x.sum(), r"has shape \(\), it must begin with \(examples, rows\), \(2, 4\)"),
        (lambda p, x, batch: x[:, :1], r"has shape \(2, 1, 3\), it must begin with \(examples, rows\), \(2, 4\)"),
        (lambda p, x, batch: {"y": x, "n": 1}, "output n is a int, it must be a tensor"),
    ],
    ids=["none", "empty", "sum", "one row", "number"],
)
def test_outputs_that_are_no_rows(function, told):
    with pytest.raises(AssertionError, match=told):
        assert_streams(rowwise(function), WEIGHT, X, BATCH)


def test_equal_values_that_differ_are_told_shortly():
    form = rowwise(lambda weight, x, batch: x @ weight + torch.arange(x.shape[1], dtype=x.dtype)[:, None])
    with pytest.raises(AssertionError) as caught:
        assert_streams(form, WEIGHT, X, BATCH, chunk=2)
    assert "numbers differ, the first at [0, 2, 0]: found" in str(caught.value)
    assert len(str(caught.value)) < 500


class Forgetful(Attending):
    """Gives nothing back to what attention was kept of."""

    def backward(self, params, x, batch, chunk, cotangent, grads, kept=None):
        dx, grads = super().backward(params, x, batch, chunk, cotangent, grads, kept)
        return (tuple(leaf * 0 for leaf in dx) if kept else dx), grads


def test_attention_that_is_kept_is_one_of_the_ways():
    form = exact.model(("causal",)).layers[1].form
    params, batch = exact.init(("causal",))["causal0"], exact.batch(2, 4)
    x = torch.randint(-1, 2, (2, 4, exact.WIDTH)).double()
    assert_streams(form, params, x, batch, draws=2)
    with pytest.raises(AssertionError, match="rows at a time, attention kept: the gradient of x"):
        assert_streams(Forgetful(form.kv, form.rows), params, x, batch, draws=2)


@pytest.mark.parametrize("how", [{}, {"chunk": 2}, {"chunk": 2, "order": "chunk"}], ids=str)
def test_a_large_weight_under_autocast_inside_a_layer(how):
    def narrow(weight, x, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + F.linear(x, weight).float()

    def score(output, batch):
        return output.square().mean(-1)

    model = Model(
        (
            Layer("first", rowwise(lambda p, x, batch: batch.row["x"] * p), "first"),
            Layer("second", rowwise(narrow), "second"),
            Layer("head", rowwise(lambda p, x, batch: x * p), "head"),
        )
    )
    params = {"first": torch.ones(1024), "second": torch.randn(1024, 1024) / 32, "head": torch.ones(1024)}
    count = torch.tensor(8.0, dtype=torch.float64)
    objective = Objective(
        "squares", lambda batch: batch, lambda batch: count, score, lambda s, b, t: weighted_mean(s, t)
    )
    batch = Batch(row={"x": torch.randn(2, 4, 1024)})
    assert_computes(value_and_grad(model, objective, **how), model, objective, params, batch, tolerance=1e-2)


def test_a_state_without_gradient_is_found_however_few_the_draws():
    body = recurrent(
        lambda p, x, state, batch: (x @ p + state.detach()[:, None], x.sum(1)), lambda p, batch: X[:, 0] * 0
    )
    with pytest.raises(AssertionError):
        assert_streams(body, WEIGHT, X, BATCH, draws=1)
