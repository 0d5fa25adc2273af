"""Layers whose vector-Jacobian products hand out one tensor twice: nothing that is added to is anybody else's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, Layer, Model, random, reference, value_and_grad
from rpfunc.objectives import Objective
from rpfunc.stream import recurrent, rowwise
from rpfunc.testing import assert_close


def draw(key, *shape):
    return random.normal(random.fold_in(random.key(3), key), shape, torch.float64)


def squares(linear):
    """Σ s or (Σ s)², where the score is the output itself: its cotangent goes straight into what is added to."""
    return Objective(
        "squares",
        prepare=lambda batch: batch,
        total=lambda batch: torch.ones((), dtype=torch.float64),
        score=lambda output, batch: output,
        loss=lambda sums, batch, total: (sums if linear else sums.square()).sum() / total,
        linear=linear,
    )


@given(rows=st.integers(1, 6), chunk=st.integers(1, 7), order=st.sampled_from(["layer", "chunk"]), linear=st.booleans())
def test_a_head_gradient_that_is_the_derivative_itself(rows, chunk, order, linear):
    head = Layer("head", rowwise(lambda p, x, batch: 2 * x + p), "h")
    model = Model((Layer("scale", rowwise(lambda p, x, batch: batch.row["x"] * p), "e"), head))
    params = {"e": draw("e", rows)[:1], "h": draw("h", 2, 1)}
    batch = Batch(row={"x": draw("x", 2, rows)})
    _, wanted = reference.value_and_grad(model, squares(linear))(params, batch)
    _, grads = value_and_grad(model, squares(linear), chunk=chunk, order=order)(params, batch)
    assert_close(grads, wanted, 1e-12)


def delay():
    """Gives its input two rows later, plus an offset: states, outputs and cotangents are handed on as they are."""

    def body(p, x, state, batch):
        first, second = state
        outputs = []
        for row in range(x.shape[1]):
            outputs.append(second)
            first, second = (x.squeeze(1) if x.shape[1] == 1 else x[:, row]), first + p
        return torch.stack(outputs, dim=1), (first, second)

    def init(p, batch):
        zeros = torch.zeros(batch.num_examples, 3, dtype=torch.float64)
        return zeros, zeros

    return recurrent(body, init)


@given(
    rows=st.integers(1, 6),
    examples=st.integers(1, 2),
    chunk=st.integers(1, 7),
    order=st.sampled_from(["layer", "chunk"]),
    linear=st.booleans(),
)
def test_a_recurrence_that_hands_its_cotangents_on_as_they_are(rows, examples, chunk, order, linear):
    layers = (
        Layer("scale", rowwise(lambda p, x, batch: batch.row["x"] * p), "e"),
        Layer("delay", delay(), "d"),
        Layer("head", rowwise(lambda p, x, batch: (x * p).sum(-1)), "h"),
    )
    params = {"e": draw("e", 3), "d": draw("d", examples, 3), "h": draw("h", 3)}
    batch = Batch(row={"x": draw("x", examples, rows, 3)})
    _, wanted = reference.value_and_grad(Model(layers), squares(linear))(params, batch)
    _, grads = value_and_grad(Model(layers), squares(linear), chunk=chunk, order=order)(params, batch)
    assert_close(grads, wanted, 1e-12)


@pytest.mark.parametrize("workers", [None, 1, 2])
def test_the_callers_autocast_holds_in_the_workers(workers):
    layers = (
        Layer("linear", rowwise(lambda p, x, batch: batch.row["x"] @ p), "w"),
        Layer("head", rowwise(lambda p, x, batch: (x @ p).sum(-1).double()), "h"),
    )
    params = {"w": draw("w", 3, 4).float(), "h": draw("h", 4, 2).float()}
    batch = Batch(row={"x": draw("x", 2, 5, 3).float()})
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = reference.value_and_grad(Model(layers), squares(True))(params, batch)
        result, _ = value_and_grad(Model(layers), squares(True), workers=workers)(params, batch)
    plain, _ = reference.value_and_grad(Model(layers), squares(True))(params, batch)
    assert result.loss == loss != plain
