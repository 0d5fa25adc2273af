"""Layers that hand tensors on, rows that skip what they leave, documents cut out by hand: right in every way."""

import pytest
import torch

from rpfunc import Batch, Layer, Model, random, reference, tree, value, value_and_grad
from rpfunc.models import decoder
from rpfunc.models.decoder import DecoderConfig
from rpfunc.objectives import sft
from rpfunc.stream import attend, attending, opaque, rowwise

EMBED = Layer("embed", rowwise(lambda p, x, batch: p[batch.row["tokens"]]), "table")
HEAD = Layer("head", rowwise(lambda p, x, batch: x @ p.T), "table")
WAYS = [{"chunk": chunk, "keep_attention": keep} for chunk in (1, 2, 4, 16) for keep in (0, 1)]
STEPS = [{"chunk": chunk, "order": "chunk"} for chunk in (1, 2, 4, 16)]


def weight(*shape, seed=0):
    return random.normal(random.key(seed), shape, torch.float64)


def make_batch(num_rows, **row):
    tokens = (random.uniform(random.key(3), (2, num_rows)) * 7).long()
    return Batch(row={"tokens": tokens, "labels": tokens, **row})


def check(model, params, batch, how):
    _, wanted = reference.value_and_grad(model, sft())(params, batch)
    _, found = value_and_grad(model, sft(), **how)(params, batch)
    for a, b in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_an_opaque_layer_may_hand_its_input_on(how):
    act = Layer("act", rowwise(lambda p, x, batch: torch.tanh(x)), ())
    mix = Layer("mix", opaque(lambda p, x, batch: {"h": torch.tanh(x @ p), "skip": x}), "mix")
    out = Layer("out", rowwise(lambda p, x, batch: x["h"] + x["skip"]), ())
    check(Model((EMBED, act, mix, out, HEAD)), {"table": weight(7, 4), "mix": weight(4, 4)}, make_batch(6), how)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_batch_that_is_handed_on_is_not_written_into(how):
    features = weight(2, 6, 4)
    first = Layer("features", opaque(lambda p, x, batch: batch.row["features"]), ())
    model = Model((first, Layer("linear", rowwise(lambda p, x, batch: x @ p), "linear"), HEAD))
    before = features.clone()
    check(model, {"linear": weight(4, 4), "table": weight(7, 4)}, make_batch(6, features=features), how)
    assert torch.equal(features, before)


@pytest.mark.parametrize("how", WAYS + STEPS, ids=str)
def test_rows_may_skip_what_they_leave_for_later_ones(how):
    def row_before(p, x, kv, batch):  # y_t = x_t + kv_{t-1}
        first = kv.shape[1] - x.shape[1]
        if first == 0 and x.shape[1] == 1:
            return x
        return x + (kv[:, first - 1 : -1] if first else torch.cat((torch.zeros_like(kv[:, :1]), kv[:, :-1]), dim=1))

    shift = Layer("shift", attending(lambda p, x, batch: x @ p, row_before), "shift")
    check(Model((EMBED, shift, HEAD)), {"table": weight(7, 4), "shift": weight(4, 4)}, make_batch(6), how)


@pytest.mark.parametrize("how", WAYS + STEPS, ids=str)
def test_documents_that_are_cut_out_of_the_keys(how):
    def kv(p, x, batch):
        return {name: (x @ p[name])[:, :, None] for name in ("k", "v")}

    def rows(p, x, kv, batch):
        queries, parts, start, stop = (x @ p["q"])[:, :, None], [], batch.first_row, batch.first_row + x.shape[1]
        while start < stop:
            first, end = start // 8 * 8, min(stop, (start // 8 + 1) * 8)
            own = queries[:, start - batch.first_row : end - batch.first_row]
            parts.append(attend(own, kv["k"][:, first:end], kv["v"][:, first:end]))
            start = end
        return x + torch.cat(parts, dim=1)[:, :, 0]

    layers = [Layer(name, attending(kv, rows), "a") for name in ("a1", "a2")]
    params = {"table": weight(7, 6), "a": {name: weight(6, 6, seed=i) / 2 for i, name in enumerate("qkv")}}
    check(Model((EMBED, *layers, HEAD)), params, make_batch(16), how)


@pytest.mark.parametrize("how", [{}, {"chunk": 4}, {"chunk": 4, "order": "chunk"}], ids=str)
def test_large_weights_and_few_rows_have_the_same_bits_in_every_plan(how):
    config = DecoderConfig(
        width=1024, mlp_width=1030, heads=4, kv_heads=4, head_size=256, layers=2, vocabulary=1030
    )  # weights of more than 2^20 elements
    model, params, batch = decoder.model(config), decoder.init(config, random.key(0)), make_batch(12)
    runs = [
        value_and_grad(model, sft(), plan=plan, recompute=recompute, **how)(params, batch)
        for plan, recompute in [("X0:4", True), ("F0:2 X2:4 B0:2", True), ("F0:2 X2:4 B0:2", False)]
        if recompute or "order" not in how
    ]
    for result, grads in runs[1:]:
        assert torch.equal(result.loss, runs[0][0].loss)
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(grads), tree.leaves(runs[0][1]), strict=True))
    assert torch.equal(value(model, sft(), **how)(params, batch)[0], runs[0][0].loss)
