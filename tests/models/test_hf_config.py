"""What configs say: what is unknown or not supported is refused by name, older spellings mean what they meant."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, batch, module, oracle, transformers

from rpfunc import value_and_grad
from rpfunc.models import hf
from rpfunc.objectives import sft

LLAMA = {
    "model_type": "llama",
    "vocab_size": 17,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def refusals(**fields):
    with pytest.raises(ValueError, match="config") as caught:
        hf.from_config(LLAMA | fields)
    return str(caught.value)


def test_every_problem_is_listed():
    text = refusals(
        hidden_act="mish", rope_scaling={"rope_type": "dynamic", "factor": 2.0}, num_attention_heads=3,
        num_key_value_heads=2, attention_chunk_size=8, attention_dropout=1.5, vocab_size=None, mlp_bias="yes",
        pad_token_id=17, quantization_config={"quant_method": "mxfp4"}, head_dim=3, rms_norm_eps=0, pretraining_tp=2,
    )  # fmt: skip
    assert text.split("\n")[0] == "config (llama): 13 problems"
    for line in [
        "hidden_act is 'mish'; supported is 'gelu' or 'gelu_new' or 'gelu_pytorch_tanh' or 'relu' or 'silu' or 'swish'",
        "rope_scaling.rope_type is 'dynamic'; supported is 'default', 'linear', 'llama3' or 'yarn'",
        "num_key_value_heads is 2; num_attention_heads 3 must be a multiple of it",
        "attention_chunk_size is 8; the field is not known, and may change what the model computes",
        "attention_dropout is 1.5; it must be at least 0 and below 1",
        "vocab_size is None; it must be an integer of at least 1",
        "mlp_bias is 'yes'; it must be true or false",
        "head_dim is 3; rotary positions need it even",
        "rms_norm_eps is 0; it must be a positive number",
        "pretraining_tp is 2; supported is 1",
        "quantization_config is {'quant_method': 'mxfp4'}; the field is not known",
    ]:
        assert f"\n  - {line}" in text, line
    assert "pad_token_id" in text


@pytest.mark.parametrize(
    ("scaling", "needed"),
    [
        (
            {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
            "rope_scaling.rope_type is 'longrope'",
        ),
        ({"rope_type": "linear"}, "rope_scaling.factor is None; it must be a positive number"),
        ({"rope_type": "linear", "factor": 2.0, "spin": 3}, "rope_scaling.spin is 3; the field is not known"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor is 0.5"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}, "rope_scaling.mscale is 1.0; the field is not known"),
        ({"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}, "above low_freq_factor"),
        ("linear", "rope_scaling is 'linear'; it must hold rope_type"),
    ],
)
def test_rope_values_are_refused_by_name(scaling, needed):
    assert needed in refusals(rope_scaling=scaling)


def test_unknown_fields_that_ask_for_nothing_pass_and_others_may_be_ignored():
    hf.from_config(LLAMA | {"new_feature": False, "other": None, "_private": 3})
    assert "new_feature" in refusals(new_feature=True)
    hf.from_config(LLAMA | {"new_feature": True}, ignore=["new_feature"])


@pytest.mark.parametrize("kind", [None, "bert", 3, ["llama"]])
def test_unknown_model_types(kind):
    with pytest.raises(ValueError, match=r"model_type is .*; supported is one of \['gemma3_text', 'gpt2'"):
        hf.from_config(LLAMA | {"model_type": kind})


@pytest.mark.parametrize(
    ("family", "fields", "needed"),
    [
        ("qwen3_moe", {"output_router_logits": True}, "the router's auxiliary loss is not supported; set it to false"),
        ("gpt_oss", {"output_router_logits": True}, "the router's auxiliary loss is not supported; set it to false"),
        ("qwen3_moe", {"router_z_loss_coef": 1e-3}, "router_z_loss_coef is 0.001; the field is not known"),
        ("gpt_oss", {"router_z_loss_coef": 1e-3}, "router_z_loss_coef is 0.001; the field is not known"),
        ("gpt_oss", {"output_router_logits": "yes"}, "output_router_logits is 'yes'; it must be true or false"),
        ("qwen3_moe", {"num_experts_per_tok": 129}, "num_experts_per_tok is 129; there are"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; supported is False"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0; supported is null"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}},
            "rope_parameters.full_attention.truncate is False; supported is true",
        ),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types is ['full_attention']; it must be"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True; supported is False"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True; supported is False"),
        ("gpt2", {"n_head": 5}, "n_head is 5; n_embd 12 must be a multiple of it"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}, "needs a sliding_window"),
        ("qwen2", {"max_window_layers": "all"}, "max_window_layers is 'all'; it must be an integer"),
    ],
)
def test_what_a_family_does_not_support_is_refused_by_name(family, fields, needed):
    given_fields = {"gpt2": {"n_embd": 12, "n_head": 2, "n_layer": 1}}.get(family, {"num_hidden_layers": 2})
    config = CLASSES[family](**given_fields).to_dict()
    with pytest.raises(ValueError, match="config") as caught:
        hf.from_config(config | fields)
    assert needed in str(caught.value)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_module_that_adds_router_losses_is_refused_whenever_it_asks_for_them(family):
    """Their coefficient alone adds nothing, as in transformers."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 17, "num_attention_heads": 2, "head_dim": 4}
    sizes |= {"num_key_value_heads": 1, "num_experts_per_tok": 1, "intermediate_size": 8, "pad_token_id": None}
    many = {"qwen3_moe": {"num_experts": 2, "moe_intermediate_size": 8}, "gpt_oss": {"num_local_experts": 2}}[family]
    made = module(CLASSES[family](**sizes, **many, router_aux_loss_coef=0.9))
    model, params = hf.load(made)
    rows = batch(2, 5)
    _, loss, _ = oracle(made, rows)
    result, grads = value_and_grad(model, sft())(params, rows)
    assert abs(float(result.loss) - float(loss)) <= 1e-5
    made.config.output_router_logits = True
    assert oracle(made, rows)[1] > loss + 0.1  # transformers does add them
    for use in (lambda: hf.load(made), lambda: hf.write_grads(made, grads)):
        with pytest.raises(ValueError, match="output_router_logits is True; the router's auxiliary loss is not supp"):
            use()


CLASSES = {
    "gemma3": transformers.Gemma3TextConfig,
    "gpt2": transformers.GPT2Config,
    "gpt_oss": transformers.GptOssConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
}

OLD = [
    LLAMA | {"rope_theta": 500.0, "torch_dtype": "float32", "num_key_value_heads": 1},
    LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    LLAMA
    | {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
    LLAMA | {"model_type": "mistral", "num_key_value_heads": 2},
    LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2, "use_sliding_window": False, "sliding_window": 4},
    LLAMA
    | {
        "model_type": "gemma3_text", "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 4,
        "rope_theta": 1000.0, "rope_local_base_freq": 10.0, "sliding_window_pattern": 2, "sliding_window": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "cache_implementation": "hybrid",
    },
    LLAMA
    | {
        "model_type": "gpt_oss", "num_key_value_heads": 1, "head_dim": 4, "num_local_experts": 3, "rope_theta": 150000,
        "num_experts_per_tok": 2, "experts_per_token": 2, "initial_context_length": 16, "num_hidden_layers": 2,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
]  # fmt: skip


@pytest.mark.parametrize("config", OLD, ids=lambda config: config["model_type"])
def test_older_spellings_mean_what_transformers_takes_them_for(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = module(transformers.AutoConfig.from_pretrained(tmp_path))
    _, params = hf.load(made)
    rows = batch(2, 12)
    found = hf.from_config(config)(params, rows)
    assert (found - oracle(made, rows)[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_of_a_module_and_of_its_folder_mean_the_same(family, tmp_path):
    @settings(max_examples=3)
    @given(FAMILIES[family](), st.just(0))
    def check(config, seed):
        made = module(config, seed)
        made.config.save_pretrained(tmp_path)
        rows = batch(2, 7)
        _, params = hf.load(made)
        written = json.loads((tmp_path / "config.json").read_text())
        assert hf.from_config(written)(params, rows).equal(hf.from_config(made.config.to_dict())(params, rows))

    check()
