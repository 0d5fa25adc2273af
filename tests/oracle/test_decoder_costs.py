"""Costs from shapes agree with real models: with published ones by their totals, with ours by counting."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc import Batch, random, tree
from rpfunc.errors import PlanError
from rpfunc.models import decoder
from rpfunc.plan import DECODERS, DecoderShape, decoder_costs, decoder_shape, forward_flops, unit_costs

PUBLISHED = {
    "qwen3-1.7b": 1_720_574_976,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-32b": 32_762_123_264,
    "gpt-oss-20b": 20_914_757_184,
    "qwen3-235b-a22b": 235_093_634_560,
}
HEAD_TO_LAYER = {
    "qwen3-1.7b": 5.71,
    "llama-3.1-8b": 2.32,
    "qwen3-32b": 1.54,
    "gpt-oss-20b": 4.31,
    "qwen3-235b-a22b": 2.60,
}
SHAPES = st.builds(
    lambda kv_heads, serves, head_size, **sizes: DecoderShape(
        "drawn", kv_heads=kv_heads, heads=kv_heads * serves, head_size=2 * head_size, **sizes
    ),
    kv_heads=st.integers(1, 3),
    serves=st.integers(1, 3),
    head_size=st.integers(1, 3),
    layers=st.integers(1, 3),
    width=st.integers(1, 9),
    mlp_width=st.integers(1, 9),
    vocabulary=st.integers(1, 9),
    tied=st.booleans(),
    qk_norm=st.booleans(),
)


@pytest.mark.parametrize("shape", DECODERS, ids=lambda shape: shape.name)
def test_the_published_models_have_the_published_number_of_parameters(shape):
    assert shape.num_parameters == PUBLISHED[shape.name]
    moved = sum(cost.parameter_bytes for cost in decoder_costs(shape, 8, flops_per_s=1, parameter_bytes_each=1))
    assert moved == shape.num_parameters + shape.tied * shape.vocabulary * shape.width


@pytest.mark.parametrize("shape", DECODERS, ids=lambda shape: shape.name)
def test_the_head_takes_as_many_layers_as_measured_before(shape):
    costs = unit_costs(shape, 2048)
    assert [cost.forward for cost in costs[:-1]] == [0.0] + [1.0] * shape.layers
    assert round(costs[-1].forward, 2) == HEAD_TO_LAYER[shape.name]
    assert [cost.backward for cost in costs] == [3 * cost.forward for cost in costs]


@pytest.mark.parametrize(("name", "active"), [("qwen3-235b-a22b", 22e9), ("gpt-oss-20b", 3.6e9)])
def test_active_experts_alone_compute(name, active):
    multiply_adds = sum(cost.forward for cost in decoder_costs(decoder_shape(name), 1, flops_per_s=2))
    assert multiply_adds == pytest.approx(active, rel=0.03)


def config_of(shape):
    sizes = ("vocabulary", "width", "layers", "heads", "kv_heads", "head_size", "mlp_width", "qk_norm", "tied")
    return decoder.DecoderConfig(**{name: getattr(shape, name) for name in sizes})


@given(SHAPES)
def test_a_dense_model_has_as_many_parameters_as_its_shape(shape):
    params = decoder.init(config_of(shape), random.key(0))
    assert shape.num_parameters == sum(leaf.numel() for leaf in tree.leaves(params))


@settings(max_examples=max(5, settings.default.max_examples // 3))
@given(SHAPES, st.integers(1, 7), st.integers(1, 3))
def test_a_dense_model_computes_what_its_shape_says(shape, rows, examples):
    """The counter takes attention for a whole square, all rows and heads; half of that is counted here."""
    params = decoder.init(config_of(shape), random.key(0))
    batch = Batch(row={"tokens": torch.zeros(examples, rows, dtype=torch.long)}, group_size=examples)
    counted = forward_flops(decoder.model(config_of(shape)), params, batch)
    half = examples * 2 * rows * rows * shape.heads * shape.head_size
    found = [cost.forward for cost in decoder_costs(shape, rows, examples, flops_per_s=1)]
    assert found == [counted[0], *(layer - half for layer in counted[1:-1]), counted[-1]]


@given(st.integers(1, 60), st.integers(1, 80))
def test_a_window_leaves_out_the_rows_that_are_not_seen(rows, window):
    shape = DecoderShape("windowed", 2, 1, 1, 1, 1, 1, 1, window=window)
    found = decoder_costs(shape, rows, flops_per_s=1)[1].forward
    blind = replace(shape, window=None).layer_flops(rows) - 2 * rows * rows
    seen = sum(min(row + 1, window) for row in range(rows))
    # a row sees itself: half of those pairs are left out where a triangle counts as half a square
    assert found - blind == 4 * seen - 2 * min(window, rows)
    assert decoder_costs(shape, rows, flops_per_s=1)[2].forward == blind + 2 * rows * rows


def test_sizes_follow_from_bytes_each():
    shape = DecoderShape("one", 1, width=4, heads=2, kv_heads=1, head_size=3, mlp_width=5, vocabulary=7)
    costs = decoder_costs(
        shape, 10, 2, flops_per_s=1, parameter_bytes_each=1, gradient_bytes_each=4, activation_bytes_each=2
    )
    layer = 2 * 4 * 6 + 2 * 4 * 3 + 3 * 4 * 5 + 2 * 4
    assert [cost.parameter_bytes for cost in costs] == [28, layer, 32]
    assert [cost.gradient_bytes for cost in costs] == [112, 4 * layer, 128]
    assert [cost.output_bytes for cost in costs] == [160, 160, 280]
    assert [cost.residual_bytes for cost in costs] == [0, 40 * (8 + 12 + 6 + 4 + 15), 40 * 11]


def test_names_are_found_in_any_case_and_others_listed():
    assert decoder_shape("Qwen3-32B") is decoder_shape("qwen3-32b")
    with pytest.raises(PlanError) as caught:
        decoder_shape("gpt-9")
    assert str(caught.value) == (
        "decoder: there is none named 'gpt-9', "
        "there are qwen3-1.7b, llama-3.1-8b, qwen3-32b, gpt-oss-20b, qwen3-235b-a22b"
    )


def test_shapes_that_cannot_be_are_refused():
    with pytest.raises(PlanError) as caught:
        DecoderShape("odd", 0, 4, heads=3, kv_heads=2, head_size=2, mlp_width=4, vocabulary=9, experts=2, window=0,
                     active_experts=3)  # fmt: skip
    assert str(caught.value) == (
        "decoder 'odd': 4 problems\n"
        "  - layers is 0, it must be at least 1\n"
        "  - heads is 3, it must be a multiple of kv_heads 2\n"
        "  - experts is 2, it must be at least active_experts 3\n"
        "  - window is 0, it must be at least 1, or None"
    )


def test_microbatches_that_cannot_be_are_refused():
    with pytest.raises(PlanError) as caught:
        decoder_costs(DECODERS[0], 0, 0, flops_per_s=0)
    assert str(caught.value) == (
        "decoder: 3 problems\n"
        "  - rows is 0, it must be at least 1\n"
        "  - examples is 0, it must be at least 1\n"
        "  - flops_per_s is 0, it must be above 0"
    )
