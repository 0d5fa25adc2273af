"""Heads whose size is set apart from hidden / heads: nothing may be derived that the config says."""

import pytest
import torch
from tiny_models import batch, module, module_grads, oracle, transformers

from rpfunc import value_and_grad
from rpfunc.models import hf
from rpfunc.objectives import sft
from rpfunc.testing.oracles import gradient_error

SIZES = {
    "vocab_size": 17, "hidden_size": 20, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None,
}  # fmt: skip

CONFIGS = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=3, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen2": lambda: transformers.Qwen2Config(**(SIZES | {"hidden_size": 24})),
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("chunk", [None, 4])
def test_logits_gradients_and_shapes_are_the_configs(family, chunk):
    made, rows = module(CONFIGS[family]()), batch(2, 7)
    logits, loss, wanted = oracle(made, rows)
    model, params = hf.load(made)
    attention = params["block0"]["attention"]
    if family == "qwen2":
        assert attention.keys() >= {"query_bias", "key_bias", "value_bias"}
        assert "output_bias" not in attention
    else:
        assert [tuple(attention[name].shape) for name in ("query", "key", "output")] == [(32, 20), (16, 20), (20, 32)]
    assert (model(params, rows) - logits).abs().max() <= 1e-5
    result, grads = value_and_grad(model, sft(), chunk=chunk)(params, rows)
    assert result.loss.item() == pytest.approx(loss.item(), abs=1e-5)
    hf.write_grads(made, grads)
    assert gradient_error(module_grads(made), wanted) <= 1e-4


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "o_proj"])
def test_a_wrong_shape_is_refused_by_name(name, tmp_path):
    made = module(CONFIGS["qwen3"]())
    weight = getattr(made.model.layers[1].self_attn, name)
    weight.weight = torch.nn.Parameter(weight.weight[:, :-1].clone())
    with pytest.raises(ValueError, match=rf"model\.layers\.1\.self_attn\.{name}\.weight has shape"):
        hf.load(made)
