"""Integer leaves ride along wherever they stand, and never get a gradient."""

import pytest
import torch

from rpfunc import Batch, Layer, Model, Plan, value_and_grad
from rpfunc.objectives import sft
from rpfunc.stream import attending, opaque, rowwise
from rpfunc.testing import assert_computes

TOKENS = torch.tensor([[1, 0, 2, 1, 2], [2, 2, 0, 1, 0]])
BATCH = Batch(row={"tokens": TOKENS, "labels": TOKENS})
PARAMS = {"table": torch.arange(6, dtype=torch.float64).reshape(3, 2), "head": torch.ones(3, 2, dtype=torch.float64)}
CHUNKS = (None, 1, 2, 5, 9)


def embed(table, x, batch):
    return table[x]


def head(weight, x, batch):
    return x @ weight.mT


def compute(layers, chunk, plan=None):
    model = Model((*layers, Layer("head", rowwise(head), "head")))
    function = value_and_grad(model, sft(), chunk=chunk, plan=plan, workers=2, microbatches=2)
    assert_computes(function, model, sft(), PARAMS, BATCH, tolerance=1e-10)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("form", [rowwise, opaque])
def test_a_layer_may_hand_on_integers_alone(form, chunk):
    relabel = Layer("relabel", form(lambda params, x, batch: (batch.row["tokens"] + 1) % 3))
    compute([relabel, Layer("embed", form(embed), "table")], chunk, Plan.parse("F0:1 F1:2 X2:3 B0:1 B1:2"))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_layer_with_parameters_may_hand_on_integers_alone(chunk):
    pick = Layer("pick", rowwise(lambda table, x, batch: (table[batch.row["tokens"]].sum(-1) > 3).long()), "table")
    compute([pick, Layer("embed", rowwise(embed), "table")], chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("causal", [True, False])
def test_kv_may_be_integers_alone(causal, chunk):
    def count_before(params, x, kv, batch):
        return x * kv.sum(1)[:, None, None] if not causal else x * kv.cumsum(1)[:, -x.shape[1] :, None]

    counting = Layer("count", attending(lambda params, x, batch: batch.row["tokens"], count_before, causal=causal))
    compute([Layer("embed", rowwise(lambda table, x, batch: table[batch.row["tokens"]]), "table"), counting], chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_first_layer_may_attend(chunk):
    def kv(table, x, batch):
        return table[batch.row["tokens"]]

    def rows(table, x, kv, batch):
        return kv.cumsum(1)[:, -batch.num_rows :]

    compute([Layer("attend", attending(kv, rows), "table")], chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_layer_may_read_one_subtree_twice(chunk):
    twice = rowwise(lambda tables, x, batch: tables["a"][batch.row["tokens"]] * tables["b"][batch.row["labels"]])
    compute([Layer("twice", twice, {"a": "table", "b": "table"})], chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_none_and_empty_containers_ride_along(chunk):
    embed_with_nothing = rowwise(lambda table, x, batch: {"x": table[batch.row["tokens"]], "cache": None, "more": ()})
    compute(
        [Layer("embed", embed_with_nothing, "table"), Layer("pick", rowwise(lambda params, x, batch: x["x"]))], chunk
    )
