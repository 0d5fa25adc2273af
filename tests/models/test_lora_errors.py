"""What adapters refuse, and in which words."""

import pytest
import torch
import torch.nn.functional as F
from adapters import adapted, config_of

from rpfunc import Batch, Layer, Model, random
from rpfunc.errors import ModelError
from rpfunc.models import decoder, feedforward, lora, resnet
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


@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
def test_adapters_that_are_no_real_numbers_are_refused(name, dtype):
    config = config_of()
    plain, params = decoder.model(config), decoder.init(config, random.key(0))
    part = {"A": torch.zeros(2, 6), "B": torch.zeros(8, 2)}
    part[name] = part[name].to(dtype)
    with pytest.raises(ModelError) as error:
        lora.attach(plain, params, {"block0.attention.query": part}, lora.LoraConfig(("query",), rank=2))
    needed = "it must be a floating-point tensor"
    assert str(error.value) == f"lora: adapter block0.attention.query has {name} of {dtype}, {needed}"


def test_adapters_without_both_parts_are_refused():
    config = config_of()
    plain, params = decoder.model(config), decoder.init(config, random.key(0))
    with pytest.raises(ModelError, match=r"adapter head.projection is \['A'\], it must be a dict of A and B"):
        lora.attach(plain, params, {"head.projection": {"A": torch.zeros(8, 6)}}, lora.LoraConfig(("projection",)))


def test_no_adapters_at_all_are_refused():
    config = config_of()
    with pytest.raises(ModelError, match="lora: adapters is empty, it must be a dict of A and B by path"):
        lora.attach(decoder.model(config), decoder.init(config, random.key(0)), {}, lora.LoraConfig(("query",)))


def test_parameters_of_another_model_are_not_merged():
    config = config_of(layers=1)
    plain = decoder.init(config, random.key(0), torch.float64)
    model, params = adapted(config, ("query", "up"))
    advice = "give those that lora.adapt, lora.attach or lora_peft.load returned with the model"
    with pytest.raises(ModelError) as error:
        lora.merge(model, plain)
    assert str(error.value) == f"lora: params lacks the adapters 'lora_block0'; {advice}"
    with pytest.raises(ModelError) as error:
        lora.merge(model, adapted(config, ("key", "up"), rank=3)[1])
    assert str(error.value).splitlines() == [
        "lora: 3 problems",
        f"  - params has no adapter of 'block0.attention.query'; {advice}",
        f"  - the model has no adapter of 'block0.attention.key'; {advice}",
        "  - adapter block0.mlp.up has shapes {'A': (3, 6), 'B': (5, 3)}, its weight and rank 2 need "
        "{'A': (2, 6), 'B': (5, 2)}",
    ]
    with pytest.raises(ModelError, match="no layer reads subtree 'other' of params"):
        lora.merge(model, {**params, "other": torch.ones(2)})


def test_dropout_where_rows_come_without_their_examples_is_refused_at_once():
    """Experts get the rows of all examples one after the other, a router beside them too; convolutions get no rows."""

    def mixture(p, x, batch):
        return F.linear(batch.row["x"], p["query"]) + feedforward.experts(
            feedforward.softmax_then_pick(1, True), feedforward.plain(F.relu)
        )(p["mlp"], batch.row["x"])

    experts = tuple({"up": torch.ones(3, 3), "down": torch.ones(3, 3)} for _ in range(2))
    params = {"weights": {"query": torch.ones(3, 3), "mlp": {"router": torch.ones(2, 3), "experts": experts}}}
    model = Model((Layer("block", rowwise(mixture), "weights"),))
    batch = Batch(row={"x": torch.ones(2, 5, 3)}, constant={"key": random.key(0)})
    with pytest.raises(ModelError) as error:
        lora.adapt(model, params, lora.LoraConfig(("query", "router", "experts.1.up"), dropout=0.1), random.key(0))
    said = "belongs to experts, whose rows come without their examples, so its adapter has no dropout; use dropout=0, "
    assert str(error.value).splitlines() == [
        "lora: 2 problems",
        f"  - block.mlp.experts.1.up {said}or other targets",
        f"  - block.mlp.router {said}or other targets",
    ]
    config = resnet.ResnetConfig(widths=(4,))
    with pytest.raises(ModelError, match=r"stem.weight is of shape \(4, 1, 3, 3\) and no \(outputs, inputs\), so its"):
        lora.adapt(
            *(resnet.model(config), resnet.init(config, random.key(0))),
            *(lora.LoraConfig(("stem.weight",), dropout=0.1), random.key(0)),
        )
    for targets, dropout in ((("query",), 0.1), (("*",), 0.0)):
        model_, params_ = lora.adapt(model, params, lora.LoraConfig(targets, dropout=dropout), random.key(0))
        assert model_(params_, batch).isfinite().all()


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
