"""What adapters refuse, and in which words."""

import pytest
import torch
import torch.nn.functional as F
from adapters import adapted, config_of

from rpfunc import Batch, Layer, Model, random
from rpfunc.errors import ModelError
from rpfunc.models import decoder, lora
from rpfunc.stream import opaque, rowwise


def test_targets_that_match_nothing_are_named_with_near_paths():
    config = config_of()
    with pytest.raises(ModelError) as error:
        adapted(config, ("quary", "block9.mlp.up", "embedding", "attention.norm"))
    assert str(error.value).splitlines() == [
        "lora: 3 problems",
        "  - target 'quary' matches no leaf of two dimensions or more; near it are block0.attention.query",
        "  - target 'block9.mlp.up' matches no leaf of two dimensions or more; near it are block2.mlp.up, "
        "block1.mlp.up, block0.mlp.up",
        str(error.value).splitlines()[3],
    ]
    assert str(error.value).splitlines()[3].startswith("  - target 'attention.norm' matches no leaf of two dimensions")


def test_options_that_cannot_work_are_listed():
    with pytest.raises(ModelError) as error:
        lora.LoraConfig((), rank=0, alpha=0.0, dropout=1.0)
    assert str(error.value) == (
        "lora: 4 problems\n"
        "  - targets is (), it must be a tuple of patterns, such as ('query', 'value')\n"
        "  - rank is 0, it must be at least 1\n"
        "  - alpha is 0.0, it must be positive and finite\n"
        "  - dropout is 1.0, it must be at least 0 and below 1"
    )


def test_adapters_that_do_not_fit_are_listed():
    config = config_of()
    plain, params = decoder.model(config), decoder.init(config, random.key(0))
    adapters = {
        "block0.attention.quary": {"A": torch.zeros(2, 6), "B": torch.zeros(8, 2)},
        "block0.attention.query": {"A": torch.zeros(6, 2), "B": torch.zeros(8, 2)},
    }
    with pytest.raises(ModelError) as error:
        lora.attach(plain, params, adapters, lora.LoraConfig(("query",), rank=2))
    assert str(error.value) == (
        "lora: 2 problems\n"
        "  - the model has no weight 'block0.attention.quary'\n"
        "  - adapter block0.attention.query has shapes {'A': (6, 2), 'B': (8, 2)}, its weight and rank 2 need "
        "{'A': (2, 6), 'B': (8, 2)}"
    )


def test_a_second_set_of_adapters_is_refused():
    model, params = adapted(config_of(), ("query",))
    with pytest.raises(ModelError, match=r"- params has a subtree 'lora_block0' already"):
        lora.adapt(model, params, lora.LoraConfig(("plain.mlp.up",)), random.key(0))


def test_a_weight_read_twice_by_one_layer_is_refused():
    both = rowwise(lambda p, x, batch: F.linear(F.linear(batch.row["x"], p["one"]), p["two"]))
    model = Model((Layer("only", both, {"one": "weight", "two": "weight"}),))
    with pytest.raises(ModelError, match=r"lora: layer 'only' reads only.one twice, so its uses cannot be told apart"):
        lora.adapt(model, {"weight": torch.ones(3, 3)}, lora.LoraConfig(("only.one",)), random.key(0))


def test_a_form_of_ones_own_is_refused_by_name():
    class Mine:
        def full(self, params, x, batch):
            return F.linear(batch.row["x"], params)

    model = Model((Layer("only", Mine(), "weight"),))
    with pytest.raises(
        ModelError, match=r"lora: layer 'only' has a Mine as its form, adapters need one of rpfunc.stream"
    ):
        lora.adapt(model, {"weight": torch.ones(3, 3)}, lora.LoraConfig(("only",)), random.key(0))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda p, x, batch: batch.row["x"] @ p.mT,
            r"lora: only is used otherwise than in F.linear\(x, weight\) or F.embedding\(ids, weight\), so its adapter "
            r"has no input to drop from; dropout=0 works",
        ),
        (
            lambda p, x, batch: F.linear(batch.row["x"].flatten(0, 1), p),
            r"lora: the input of only is of shape \(10, 3\); dropout is drawn by example and row, so it needs "
            r"\(2, 5, ...\), or dropout=0",
        ),
    ],
    ids=["another use", "no rows"],
)
def test_dropout_where_there_are_no_rows_to_draw_it_for(function, text):
    model = Model((Layer("only", opaque(function), "weight"),))
    config = lora.LoraConfig(("only",), dropout=0.5)
    model, params = lora.adapt(model, {"weight": torch.ones(3, 3)}, config, random.key(0))
    batch = Batch(row={"x": torch.ones(2, 5, 3)}, constant={"key": random.key(0)})
    with pytest.raises(ModelError, match=text):
        model(params, batch)
