"""Cotangents of earlier keys and values, added to the kept sums by attention's own backward pass."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, memory
from rpfunc.stream import attend, attending
from rpfunc.stream.flat import vjp
from rpfunc.stream.kept_attention import KeptAttention

HEADS, SIZE = 2, 4


def heads(weight, x):
    return F.linear(x, weight).unflatten(-1, (HEADS, SIZE))


def kv(params, x, batch):
    return {"key": heads(params["key"], x), "value": heads(params["value"], x)}


def once(params, x, kv, batch):
    return attend(heads(params["query"], x), kv["key"], kv["value"]).flatten(2)


def twice(params, x, kv, batch):
    second = attend(heads(params["query"], x).tanh(), kv["key"], kv["value"])
    return once(params, x, kv, batch) * second.flatten(2)


def read_elsewhere_too(params, x, kv, batch):
    own = kv["key"][:, -x.shape[1] :] * kv["value"][:, -x.shape[1] :]
    return once(params, x, kv, batch) + own.flatten(2)


def one_leaf_as_both(params, x, kv, batch):
    return attend(heads(params["query"], x), kv["key"], kv["key"]).flatten(2)


def crossed(params, x, kv, batch):
    return once(params, x, {"key": kv["value"], "value": kv["key"]}, batch)


def changed_first(params, x, kv, batch):
    return once(params, x, {"key": kv["key"] * 2, "value": kv["value"]}, batch)


def differentiated_inside(params, x, kv, batch):
    """The gradient of attention by its queries: an inner backward pass, whose cotangents are nobody else's."""

    def energy(queries):
        return attend(queries, kv["key"], kv["value"]).square().sum()

    with torch.enable_grad():
        return torch.func.grad(energy)(heads(params["query"], x).detach()).flatten(2).detach() + once(
            params, x, kv, batch
        )


class Stopped(torch.autograd.Function):
    """Attention whose keys and values have no gradient, not even zeros."""

    @staticmethod
    def forward(query, key, value):
        return attend(query, key, value)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent, None, None


def without_gradient(params, x, kv, batch):
    return Stopped.apply(heads(params["query"], x), kv["key"], kv["value"]).flatten(2)


def inside_a_vjp(params, x, kv, batch):
    """Its cotangents come back through one transform more."""
    output, _ = torch.func.vjp(lambda x: once(params, x, kv, batch), x)
    return output


LAYERS = [
    without_gradient,
    inside_a_vjp,
    once,
    twice,
    read_elsewhere_too,
    one_leaf_as_both,
    crossed,
    changed_first,
    differentiated_inside,
]


@pytest.mark.parametrize("rows", LAYERS, ids=lambda rows: rows.__name__)
@given(num_rows=st.integers(1, 12), chunk=st.integers(1, 12), examples=st.integers(1, 2), seed=st.integers(0, 9))
def test_gradients_are_those_of_the_whole(rows, num_rows, chunk, examples, seed):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    width = HEADS * SIZE
    params = {name: normal(width, width) for name in ("query", "key", "value")}
    x, cotangent = normal(examples, num_rows, width), normal(examples, num_rows, width)
    batch = Batch(row={"x": x})
    form = attending(kv, rows)
    _, pull = vjp(lambda params, x: form.full(params, x, batch), params, x)
    wanted_params, (wanted_x,) = pull((cotangent,))
    for share in (None, 0.5, 1.0):
        kept = () if share is None else (KeptAttention(share),)
        if kept:
            form.forward(params, x, batch, chunk, *kept)
        (dx,), grads = form.backward(params, x, batch, chunk, (cotangent.clone(),), None, *kept)
        for found, wanted in zip((dx, *grads), (wanted_x, *wanted_params), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_no_cotangent_of_all_keys_exists_beside_their_sum():
    num_rows, chunk, width = 4000, 50, HEADS * SIZE
    x, batch = torch.randn(1, num_rows, width), Batch(row={"x": torch.zeros(1, num_rows)})
    params = {name: torch.randn(width, width) for name in ("query", "key", "value")}

    def peak(rows):
        form = attending(kv, rows)
        return memory.peak(lambda: form.backward(params, x, batch, chunk, (torch.ones_like(x),), None)).peak_bytes

    # changed keys are no longer those that were looked at: their cotangents come back whole, as the values' do
    assert peak(changed_first) - peak(once) > 1.9 * x.nbytes
