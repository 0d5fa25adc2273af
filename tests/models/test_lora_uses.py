"""Adapters of any layer and any use of a weight."""

import pytest
import torch
import torch.nn.functional as F
from adapters import filled

from rpfunc import Batch, Layer, Model, random
from rpfunc.models import lora
from rpfunc.stream import attending, opaque, recurrent, rowwise
from rpfunc.testing import assert_close, assert_streams


def forms():
    """One weight, used in F.linear in each form, and what the layer computes."""

    def linear(p, x, batch):
        return F.linear(x, p)

    def seen(p, x, kv, batch):
        later = torch.ones(batch.num_rows, kv.shape[1], dtype=torch.bool).triu(kv.shape[1] - batch.num_rows + 1)
        weights = (F.linear(x, p) @ kv.mT).masked_fill(later, 0.0)
        return weights @ kv

    def body(p, x, state, batch):
        outputs = F.linear(x, p).cumsum(1) + state[:, None]
        return outputs, outputs[:, -1]

    def all_rows(p, x, kv, batch):
        return F.linear(x, p) + kv.sum(1, keepdim=True)

    return {
        "rowwise": rowwise(linear),
        "opaque": opaque(linear),
        "attending": attending(linear, seen),
        "bidirectional": attending(linear, all_rows, causal=False),
        "recurrent": recurrent(body, lambda p, batch: p.new_zeros(batch.num_examples, 3)),
    }


@pytest.mark.parametrize("name", sorted(forms()))
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_every_form_takes_adapters_and_still_streams(name, dropout):
    x = random.normal(random.key(0), (3, 7, 3), torch.float64)
    weight = random.normal(random.key(1), (3, 3), torch.float64)
    model = Model((Layer("only", forms()[name], "weight"),))
    config = lora.LoraConfig(("only",), rank=2, dropout=dropout)
    model, params = lora.adapt(model, {"weight": weight}, config, random.key(2))
    params = filled(params)
    layer = model.layers[0]
    batch = Batch(row={"x": x}, constant={"key": random.key(3)})
    assert_streams(layer.form, layer.select(params), x, batch)
    if dropout == 0.0:
        merged = {"weight": weight + 8.0 * params["lora_only"]["only"]["B"] @ params["lora_only"]["only"]["A"]}
        assert_close(layer(params, x, batch), Layer("only", forms()[name], "weight")(merged, x, batch), 1e-12)


USES = {
    "F.linear": lambda w, x: F.linear(x, w),
    "F.linear by name": lambda w, x: F.linear(weight=w, input=x, bias=x.new_ones(4)),
    "F.linear with a bias": lambda w, x: F.linear(x, w, x.new_ones(4)),
    "@": lambda w, x: x @ w.mT,
    "einsum": lambda w, x: torch.einsum("oi,bti->bto", w, x),
    "indexing": lambda w, x: w[x.abs().long().sum(-1) % 4],
    "indexing from the end": lambda w, x: w[x.abs().int().sum(-1) % 4 - 4],
    "indexing by a mask": lambda w, x: w[w.new_tensor([1, 0, 1, 1]).bool()] * x.sum(),
    "F.embedding": lambda w, x: F.embedding(x.abs().long().sum(-1) % 4, w),
    "F.embedding with padding": lambda w, x: F.embedding(x.abs().long().sum(-1) % 4, w, 2),
    "twice": lambda w, x: F.linear(x, w) + x @ w.T,
    "reshaped": lambda w, x: x @ w.reshape(2, 2, 3).flatten(0, 1).mT,
    "joined": lambda w, x: F.linear(x, torch.cat([w, w])),
    "by its shape": lambda w, x: F.linear(x, w) * (w.shape[0] + len(w) + w.dim() + w.numel()),
    "of itself": lambda w, x: F.linear(w, w) + x.sum(),
}


@pytest.mark.parametrize("use", USES)
def test_any_use_of_a_weight_is_that_of_the_merged_one(use):
    x = 2 * random.normal(random.key(0), (2, 5, 3), torch.float64)
    params = {"weight": random.normal(random.key(1), (4, 3), torch.float64)}
    model = Model((Layer("only", opaque(lambda p, x, batch: USES[use](p, batch.row["x"])), "weight"),))
    config = lora.LoraConfig(("only",), rank=2, alpha=1.0)
    adapted_model, params = lora.adapt(model, params, config, random.key(2))
    params = filled(params)
    batch = Batch(row={"x": x})
    layer = adapted_model.layers[0]

    def through_merged(a, b, weight):
        return model({"weight": weight + b @ a / 2}, batch)

    part = params["lora_only"]["only"]
    wanted, pull = torch.func.vjp(through_merged, part["A"], part["B"], params["weight"])
    found, pull_found = torch.func.vjp(
        lambda a, b, weight: layer({"lora_only": {"only": {"A": a, "B": b}}, "weight": weight}, (), batch),
        part["A"], part["B"], params["weight"],
    )  # fmt: skip
    assert_close(found, wanted, 1e-12)
    dy = random.normal(random.key(4), tuple(found.shape), torch.float64)
    if use == "F.embedding with padding":  # the merged weight's row has no gradient there, A and B included
        dy = dy.where((x.abs().long().sum(-1) % 4 != 2)[..., None], 0.0)
    assert_close(list(pull_found(dy)), list(pull(dy)), 1e-12)


def test_weights_of_experts_have_an_adapter_each():
    """A stack of weights (E, out, in) has stacks of A and B."""
    x = random.normal(random.key(0), (2, 3, 5), torch.float64)
    plain = Model((Layer("only", opaque(lambda p, x, batch: torch.einsum("eoi,bti->bteo", p, batch.row["x"])), "w"),))
    params = {"w": random.normal(random.key(1), (4, 2, 5), torch.float64)}
    model, params = lora.adapt(plain, params, lora.LoraConfig(("only",), rank=3, alpha=3.0), random.key(2))
    params = filled(params)
    part = params["lora_only"]["only"]
    assert (part["A"].shape, part["B"].shape) == ((4, 3, 5), (4, 2, 3))
    wanted = torch.stack([x @ (params["w"][e] + part["B"][e] @ part["A"][e]).T for e in range(4)], dim=2)
    assert_close(model(params, Batch(row={"x": x})), wanted, 1e-12)
    assert_close(*(m(p, Batch(row={"x": x})) for m, p in (lora.merge(model, params), (model, params))), 1e-12)


@pytest.mark.parametrize("look_up", [lambda w, ids: w[ids], lambda w, ids: F.embedding(ids, w)], ids=["w[ids]", "F"])
def test_tables_that_are_looked_up_in_have_no_dropout(look_up):
    plain = Model((Layer("only", rowwise(lambda p, x, batch: look_up(p, batch.row["ids"])), "table"),))
    table = {"table": random.normal(random.key(1), (4, 3), torch.float64)}
    ids = {"ids": torch.tensor([[0, 3, 3], [1, 2, 0]])}
    model, params = lora.adapt(plain, table, lora.LoraConfig(("only",), rank=2, dropout=0.5), random.key(2))
    params = filled(params)
    wanted = lora.merge(model, params)[1]["table"][ids["ids"]]
    assert_close(model(params, Batch(row=ids, constant={"key": random.key(4)})), wanted, 1e-12)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("a_dtype", DTYPES)
@pytest.mark.parametrize("b_dtype", DTYPES)
def test_adapters_act_in_32_bits_or_more_as_they_merge(a_dtype, b_dtype):
    """Whether attached in 16 bits, or cast to them afterwards."""
    plain = Model((Layer("only", rowwise(lambda p, x, batch: F.linear(batch.row["x"], p)), "weight"),))
    weight = {"weight": random.normal(random.key(1), (4, 3))}
    batch = Batch(row={"x": random.normal(random.key(0), (2, 5, 3))})
    part = {
        "A": random.normal(random.key(2), (2, 3)).to(a_dtype),
        "B": random.normal(random.key(3), (4, 2)).to(b_dtype),
    }
    model, params = lora.attach(plain, weight, {"only": part}, lora.LoraConfig(("only",), rank=2))
    wide = torch.promote_types(torch.promote_types(a_dtype, b_dtype), torch.float32)
    assert {leaf.dtype for leaf in params["lora_only"]["only"].values()} == {wide}
    cast = {**weight, "lora_only": {"only": part}}
    wanted = F.linear(batch.row["x"].double(), weight["weight"].double() + 8 * part["B"].double() @ part["A"].double())
    for each in (params, cast):
        assert_close(model(each, batch).double(), wanted, 1e-6)
        merged, weights = lora.merge(model, each)
        assert_close(merged(weights, batch).double(), wanted, 1e-6)


def test_dropout_is_on_the_adapters_input_alone_and_of_each_weight_apart():
    x = random.normal(random.key(0), (2, 4, 3), torch.float64)
    part = {name: random.normal(random.key(seed), (5, 3), torch.float64) for seed, name in enumerate(("one", "two"), 1)}

    def both(p, x, batch):
        return torch.stack([F.linear(batch.row["x"], p[name]) for name in ("one", "two")])

    plain = Model((Layer("only", opaque(both), "weights"),))
    config = lora.LoraConfig(("only.*",), rank=2, alpha=2.0, dropout=0.5)
    model, params = lora.adapt(plain, {"weights": part}, config, random.key(3))
    params = filled(params)
    batch = Batch(row={"x": x}, constant={"key": random.key(4)})
    found = model(params, batch)
    masks = []
    for index, name in enumerate(("one", "two")):
        adapter = params["lora_only"][f"only.{name}"]
        through = found[index] - x @ part[name].T  # = (mask * x / 0.5) A^T B^T: as many numbers as there are unknowns
        dropped = random.dropout(x, 0.5, random.fold_in(batch.constant["key"], f"lora.only.{name}"), batch)
        assert_close(through, dropped @ adapter["A"].T @ adapter["B"].T, 1e-12)
        masks.append(dropped == 0)
    assert not torch.equal(*masks)
    without = Batch(row={"x": x})
    merged = [
        part[name] + params["lora_only"][f"only.{name}"]["B"] @ params["lora_only"][f"only.{name}"]["A"]
        for name in part
    ]
    assert_close(model(params, without), torch.stack([x @ weight.T for weight in merged]), 1e-12)
