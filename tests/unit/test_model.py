import pytest
import torch

from rpfunc import Batch, Layer, Model, random, value_and_grad
from rpfunc.errors import ModelError
from rpfunc.models import decoder, mlp
from rpfunc.stream import rowwise
from rpfunc.testing import exact

IDENTITY = rowwise(lambda params, x, batch: x)


def model(*reads):
    return Model(tuple(Layer(f"layer{index}", IDENTITY, each) for index, each in enumerate(reads)))


def test_layers_may_come_one_by_one():
    layers = exact.model().layers
    assert Model(layer for layer in layers) == Model(list(layers)) == Model(layers)
    assert value_and_grad(Model(iter(layers)), exact.linear())(exact.init(), exact.batch(2, 3))[0].loss.isfinite()


@pytest.mark.parametrize(
    "layers", [None, exact.model().layers[0], 3, [None], "ab"], ids=["None", "a layer", "3", "a list", "a text"]
)
def test_what_is_no_layer_is_no_model(layers):
    with pytest.raises(
        ModelError, match=r"^model: (layers is|found) an? .*, needs (several Layers, as in .*|a Layer)$"
    ):
        Model(layers)


def test_a_layer_gets_the_shape_that_its_reads_have():
    layer = Layer("layer", IDENTITY, {"norm": "a", "pair": ("b", "a")})
    params = {"a": torch.ones(1), "b": torch.zeros(1)}
    assert layer.select(params) == {"norm": params["a"], "pair": (params["b"], params["a"])}
    assert layer.subtrees == ("a", "b", "a")
    assert Layer("none", IDENTITY).subtrees == ()


def test_gradients_of_shared_subtrees_are_added_in_layer_order():
    params = {"shared": torch.zeros(()), "own": torch.zeros(())}
    grads = [[(torch.tensor(1e8),)], [(torch.tensor(3.0), torch.tensor(1.0))], [(torch.tensor(-1e8),)]]
    shared = model("shared", {"a": "own", "b": "shared"}, "shared")
    assert shared.sum_grad("own", grads, params) == 3.0
    assert shared.sum_grad("shared", grads, params) == (torch.tensor(1e8) + 1.0) - 1e8


def test_what_blocks_have_found_of_a_layer_is_added_before_layers_are():
    params = {"shared": torch.zeros(())}
    grads = [[(torch.tensor(1.0),), (torch.tensor(2.0),)], [(torch.tensor(1e8),), (torch.tensor(-1e8),)]]
    assert model("shared", "shared").sum_grad("shared", grads, params) == 3.0


def test_a_layer_without_a_gradient_counts_as_zero_and_zeros_are_wide():
    params = {"a": torch.ones(2, dtype=torch.bfloat16)}
    assert model("a").sum_grad("a", [()], params).dtype == torch.float32
    assert model("a", "a").sum_grad("a", [(), [(torch.ones(2),)]], params).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Model(()), "model: has no layer, needs at least one"),
        (
            lambda: Model(
                (Layer("a", IDENTITY, "w"), Layer("a", IDENTITY, 3), Layer("b", IDENTITY), Layer("b", IDENTITY))
            ),
            "model: 3 problems\n"
            "  - layer 'a' appears 2 times\n"
            "  - layer 'b' appears 2 times\n"
            "  - layer 'a' reads 3, which is no subtree name (a string)",
        ),
        (
            lambda: model("w", "missing").check(
                {"w": {"i": torch.zeros(2, dtype=torch.int64), "n": 1.0}, "extra": torch.zeros(1)}
            ),
            "model: 4 problems\n"
            "  - params lacks subtree 'missing'\n"
            "  - no layer reads subtree 'extra' of params\n"
            "  - params leaf w.i is a torch.int64 tensor, needs a floating-point tensor\n"
            "  - params leaf w.n is a float, needs a floating-point tensor",
        ),
        (
            lambda: decoder.DecoderConfig(vocabulary=0, heads=3, kv_heads=2, head_size=3, dropout=1.0),
            "decoder: 4 problems\n"
            "  - vocabulary is 0, it must be at least 1\n"
            "  - heads is 3, it must be a multiple of kv_heads 2\n"
            "  - head_size is 3, rotary positions need it even\n"
            "  - dropout is 1.0, it must be at least 0 and below 1",
        ),
        (lambda: mlp.MlpConfig(widths=(3,)), "mlp: widths is (3,), it needs at least two numbers, each at least 1"),
    ],
)
def test_what_does_not_fit_is_refused_all_at_once(make, message):
    with pytest.raises(ModelError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize("workers", [None, 2])
def test_wrong_parameters_are_refused_before_any_work(workers):
    params = {name: part for name, part in exact.init().items() if name != "square0"} | {"squared": torch.zeros(1)}
    with pytest.raises(ModelError) as caught:
        value_and_grad(exact.model(), exact.linear(), workers=workers)(params, exact.batch(1, 1))
    assert str(caught.value) == (
        "model: 2 problems\n  - params lacks subtree 'square0'\n  - no layer reads subtree 'squared' of params"
    )


def test_a_whole_model_is_the_composition_of_its_layers():
    double = rowwise(lambda params, x, batch: x * 2 if isinstance(x, torch.Tensor) else batch.row["x"] + 1)
    composed = Model((Layer("first", double), Layer("second", double)))
    assert composed({}, Batch(row={"x": torch.ones(1, 1)})).item() == 4.0


@pytest.mark.parametrize("tied", [True, False])
def test_initial_decoder_parameters_are_what_the_model_reads(tied):
    config = decoder.DecoderConfig(layers=2, width=8, mlp_width=8, tied=tied, bias=True, qk_norm=True)
    params = decoder.init(config, random.key(0), torch.float64)
    decoder.model(config).check(params)
    assert ("head" in params) != tied
    weights = params["block0"]["attention"]["query"]
    assert weights.dtype == torch.float64
    assert abs(weights.std() / config.deviation - 1) < 0.1
    assert not torch.equal(weights, params["block1"]["attention"]["query"])
