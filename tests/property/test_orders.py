"""Layer-major and chunk-major streaming, windows, recurrence, frozen leaves: one gradient, however it is found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, Layer, Model, random, reference, tree, value, value_and_grad
from rpfunc.errors import OptionsError, PlanError
from rpfunc.models import decoder
from rpfunc.models.decoder import DecoderConfig
from rpfunc.objectives import dpo, sft
from rpfunc.stream import attend, attending, opaque, recurrent, rowwise
from rpfunc.testing import assert_close, strategies

V, W = 7, 6


def embed(p, x, batch):
    return p[batch.row["tokens"]]


def head(p, x, batch):
    return x @ p.T


def attention(window=None, causal=True):
    def kv(p, x, batch):
        return {"key": (x @ p["k"]).unflatten(-1, (1, W)), "value": (x @ p["v"]).unflatten(-1, (1, W))}

    def rows(p, x, kv, batch):
        query = (x @ p["q"]).unflatten(-1, (2, W))
        attended = attend(query, kv["key"], kv["value"], causal=causal, window=window)
        return x + attended.flatten(2) @ p["o"]

    return attending(kv, rows, causal=causal, window=window)


def gated_sum():
    """s_t = f_t * s_{t-1} + x_t W, y_t = x_t + s_t, with f_t = sigmoid(x_t F): written one row after the other."""

    def body(p, x, state, batch):
        forget, inputs = torch.sigmoid(x @ p["f"]), x @ p["w"]
        states = []
        for row in range(x.shape[1]):
            state = forget[:, row] * state + inputs[:, row]
            states.append(state)
        return x + torch.stack(states, dim=1), state

    return recurrent(body, lambda p, batch: p["s"].expand(batch.num_examples, W))


def model(kind):
    middle = {
        "full": [Layer("a", attention(), "a")],
        "window": [Layer("a", attention(window=3), "a")],
        "recurrent": [Layer("r", gated_sum(), "r")],
        "mixed": [Layer("a", attention(window=2), "a"), Layer("r", gated_sum(), "r"), Layer("b", attention(), "a")],
    }[kind]
    return Model((Layer("embed", rowwise(embed), "table"), *middle, Layer("head", rowwise(head), "table")))


def draw(key, *shape):
    return random.normal(random.fold_in(random.key(7), key), shape, torch.float64) / 3


def parameters(model):
    every = {
        "table": draw("t", V, W),
        "a": {"k": draw("k", W, W), "v": draw("v", W, W), "q": draw("q", W, 2 * W), "o": draw("o", 2 * W, W)},
        "r": {"f": draw("f", W, W), "w": draw("w", W, W), "s": draw("s", W)},
    }
    return {name: every[name] for layer in model.layers for name in layer.subtrees}


def batch(examples, rows, seed):
    tokens = (random.uniform(random.key(seed), (examples, rows)) * V).long()
    return Batch(row={"tokens": tokens, "labels": tokens}, constant={"key": random.key(seed)})


@given(
    kind=st.sampled_from(["full", "window", "recurrent", "mixed"]),
    order=st.sampled_from(["layer", "chunk"]),
    data=st.data(),
)
def test_every_order_and_chunk_gives_the_reference_gradient(kind, order, data):
    made = model(kind)
    rows, examples = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    batch_ = batch(examples, rows, data.draw(st.integers(0, 99)))
    params = parameters(made)
    loss, wanted = reference.value_and_grad(made, sft())(params, batch_)
    how = {
        "chunk": data.draw(st.integers(1, rows + 5)),
        "head_chunk": data.draw(strategies.chunks(rows)),
        "order": order,
        "microbatches": data.draw(st.integers(1, 3)),
    }
    plan, workers = data.draw(strategies.plans(made.num_layers)), data.draw(strategies.workers(2))
    result, grads = value_and_grad(made, sft(), plan=plan, workers=workers, **how)(params, batch_)
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=1e-12)
    assert_close(grads, wanted, 1e-10)
    torch.testing.assert_close(value(made, sft(), **how)(params, batch_)[0], loss, rtol=1e-12, atol=1e-12)


@given(order=st.sampled_from(["layer", "chunk"]), chunk=st.integers(1, 7), head_chunk=st.integers(1, 7))
def test_an_objective_that_is_not_linear_streams_in_both_orders(order, chunk, head_chunk):
    made = model("mixed")
    params, plain = parameters(made), batch(4, 6, 3)
    pairs = Batch(row=plain.row, example={"reference_logprobs": torch.linspace(-9, -5, 4)}, group_size=2)
    loss, wanted = reference.value_and_grad(made, dpo())(params, pairs)
    function = value_and_grad(made, dpo(), microbatches=2, chunk=chunk, head_chunk=head_chunk, order=order)
    result, grads = function(params, pairs)
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=1e-12)
    assert_close(grads, wanted, 1e-10)


@given(order=st.sampled_from(["layer", "chunk"]), chunk=st.integers(1, 10), plan=strategies.plans(4))
def test_the_decoder_with_dropout_has_one_gradient(order, chunk, plan):
    config = DecoderConfig(
        vocabulary=V, width=8, layers=2, heads=4, kv_heads=2, head_size=2, mlp_width=6, qk_norm=True, dropout=0.3
    )
    made, params = decoder.model(config), decoder.init(config, random.key(0), torch.float64)
    _, wanted = reference.value_and_grad(made, sft())(params, batch(3, 8, 1))
    _, grads = value_and_grad(made, sft(), microbatches=2, chunk=chunk, order=order, plan=plan)(params, batch(3, 8, 1))
    assert_close(grads, wanted, 1e-10)


@given(
    frozen=st.sets(st.sampled_from(["table", "a.k", "a.v", "a.q", "a.o", "r.f", "r.w", "r.s"])),
    order=st.sampled_from(["layer", "chunk"]),
    chunk=st.none() | st.integers(1, 7),
    plan=strategies.plans(5),
)
def test_frozen_leaves_have_no_gradient_and_change_no_other(frozen, order, chunk, plan):
    made = model("mixed")
    params = parameters(made)
    _, wanted = reference.value_and_grad(made, sft())(params, batch(2, 6, 1))

    def mask(path, leaf):
        return path in frozen

    function = value_and_grad(made, sft(), chunk=chunk, order=order if chunk else "layer", plan=plan, frozen=mask)
    _, grads = function(params, batch(2, 6, 1))
    _, wanted = tree.partition(wanted, mask)
    assert set(tree.paths(grads)) == {"table", "a.k", "a.v", "a.q", "a.o", "r.f", "r.w", "r.s"} - frozen
    if tree.leaves(wanted):
        assert_close(grads, wanted, 1e-10)


def test_layers_that_look_ahead_are_refused_chunk_by_chunk_by_name():
    middle = (
        Layer("ahead", attention(causal=False), "a"),
        Layer("any", opaque(lambda p, x, batch: x)),
    )
    made = Model((Layer("embed", rowwise(embed), "table"), *middle, Layer("head", rowwise(head), "table")))
    with pytest.raises(PlanError) as caught:
        value_and_grad(made, sft(), chunk=3, order="chunk")
    assert str(caught.value) == (
        'order "chunk" needs row-wise, causal or recurrent layers (order "layer" takes any): 2 problems\n'
        "  - layer 'ahead' is bidirectional, its rows may depend on later rows\n"
        "  - layer 'any' is opaque, its rows may depend on later rows"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "chunk"}, "order is 'chunk', which needs a chunk, for example chunk=512"),
        ({"order": "columns"}, "order is 'columns', it must be 'layer' or 'chunk'"),
        ({"head_chunk": 0}, "head_chunk is 0, it must be at least 1 row"),
    ],
)
def test_streaming_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(OptionsError, match=message):
        value_and_grad(model("full"), sft(), **options)
