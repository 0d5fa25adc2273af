"""A window counts the row itself, in `attend` and in the families that have windows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import batch, module, oracle, transformers

from rpfunc import value_and_grad
from rpfunc.models import hf
from rpfunc.objectives import sft
from rpfunc.stream import attend

SIZES = {
    "vocab_size": 17, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "pad_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 4, 6])
@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (3, [0, 0.5, 1, 2, 3, 4]),
        (1, [0, 1, 2, 3, 4, 5]),
        (6, [0, 0.5, 1, 1.5, 2, 2.5]),
        (7, [0, 0.5, 1, 1.5, 2, 2.5]),
        (None, [0, 0.5, 1, 1.5, 2, 2.5]),
    ],
)
def test_means_of_what_a_row_sees(window, wanted, chunk, masked):
    query, key = torch.zeros(1, 6, 1, 2), torch.ones(1, 6, 1, 2)
    value = torch.arange(6.0).reshape(1, 6, 1, 1)
    visible = torch.ones(1, 6, dtype=torch.bool) if masked else None  # a mask that hides nothing
    found = [
        attend(
            query[:, start : start + chunk],
            key[:, :stop],
            value[:, :stop],
            window=window,
            visible=None if visible is None else visible[:, :stop],
        )
        for start in range(0, 6, chunk)
        for stop in [min(start + chunk, 6)]
    ]
    assert torch.cat(found, dim=1).flatten().tolist() == pytest.approx(wanted)


@given(st.integers(1, 2), st.integers(1, 6), st.integers(0, 3), st.integers(1, 3), st.sampled_from([None, 2.0]))
def test_a_row_that_sees_itself_alone_gives_no_gradient_to_scores(kv_heads, queries, before, groups, soft_cap):
    generator = torch.Generator().manual_seed(0)
    keys = queries + before
    query = torch.randn(2, queries, kv_heads * groups, 4, generator=generator, requires_grad=True)
    key, value = (torch.randn(2, keys, kv_heads, 4, generator=generator, requires_grad=True) for _ in range(2))
    output = attend(query, key, value, window=1, soft_cap=soft_cap)
    assert torch.equal(output, value[:, before:].repeat_interleave(groups, dim=2))
    assert output.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    dq, dk, dv = torch.autograd.grad(
        output.square().sum(), (query, key, value), allow_unused=True, materialize_grads=True
    )
    assert not dq.any()
    assert not dk.any()
    assert torch.allclose(dv[:, before:], 2 * groups * value[:, before:])
    assert not dv[:, :before].any()


@pytest.mark.parametrize("window", [1, 3, 6, 50])
@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss", "mistral"])
def test_windows_of_families_across_chunks(kind, window):
    layer_types = ["sliding_attention", "full_attention"]
    config = {
        "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, sliding_window=window, layer_types=layer_types),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **SIZES, sliding_window=window, layer_types=layer_types, num_local_experts=2, num_experts_per_tok=1
        ),
        "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=window),
    }[kind]()
    made, rows = module(config), batch(2, 6)
    logits, loss, _ = oracle(made, rows)
    model, params = hf.load(made)
    assert (model(params, rows) - logits).abs().max() <= 1e-5
    for chunk in (2, 4):
        result, _ = value_and_grad(model, sft(), chunk=chunk)(params, rows)
        assert abs(float(result.loss) - float(loss)) <= 1e-5
