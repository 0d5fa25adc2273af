"""Config values that nobody would write by hand: nulls mean what they mean to transformers, all others are refused."""

import inspect
import json
import math
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import batch, module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rpfunc.errors import ModelError
from rpfunc.models import hf
from rpfunc.models.families import FAMILIES
from rpfunc.models.families.fields import INERT, Fields
from rpfunc.models.hf.convert import to_params
from rpfunc.models.hf.pretrained import describe

SIZES = {
    "vocab_size": 17, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATER = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
EXPERTS = {"head_dim": 4, "num_experts_per_tok": 1, "sliding_window": 3}
CONFIGS = {
    "gemma3_text": SIZES | {"head_dim": 4, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"vocab_size": 17, "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16, "eos_token_id": 2},
    "gpt_oss": SIZES | EXPERTS | {"num_local_experts": 2},
    "llama": SIZES,
    "mistral": SIZES | {"sliding_window": 3},
    "qwen2": SIZES | LATER,
    "qwen3": SIZES | LATER | {"head_dim": 4},
    "qwen3_moe": SIZES
    | EXPERTS
    | {"num_experts": 2, "moe_intermediate_size": 4, "use_sliding_window": True, "rope_theta": 100.0},
}
CONFIGS = {kind: {"model_type": kind, **fields} for kind, fields in CONFIGS.items()}


class Asked(dict):
    """A config that notes what it was asked for."""

    def __init__(self, fields):
        super().__init__(fields)
        self.names = set(fields)

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)


def read_fields(kind):
    asked = Asked(CONFIGS[kind])
    FAMILIES[kind].read(Fields(asked))
    return sorted(asked.names - {"model_type"})


def oracle(kind, config):
    """Returns the module that transformers makes of the config, and its logits; None where it makes none."""
    try:
        made = module(CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(config))))
        return made, made(input_ids=batch(1, 9).row["tokens"]).logits.detach()
    except Exception:
        return None


WITHOUT_EFFECT = {
    "router_aux_loss_coef",
    "sliding_window_pattern",
    "rope_local_base_freq",
    "experts_per_token",
    "pad_token_id",
}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("value", [None, {}], ids=["null", "empty"])
def test_nulls_and_empties_mean_what_transformers_takes_them_for(kind, value):
    for name in read_fields(kind):
        config = CONFIGS[kind] | {name: value}
        try:
            model = hf.from_config(config)
        except ModelError:
            continue
        made = oracle(kind, config)
        if made is None:
            assert name in INERT | WITHOUT_EFFECT or name.startswith("summary_"), f"{name}: transformers refuses it"
            continue
        tensors = {each: tensor.detach() for each, tensor in made[0].state_dict(keep_vars=True).items()}
        params = to_params(FAMILIES[kind], describe(config).tables, tensors, kind)
        assert (model(params, batch(1, 9)) - made[1]).abs().max() <= 1e-5, name


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("llama", "num_key_value_heads", None), ("llama", "head_dim", None), ("llama", "pretraining_tp", None),
        ("llama", "attention_dropout", None), ("mistral", "head_dim", None), ("mistral", "sliding_window", None),
        ("qwen2", "num_key_value_heads", None), ("qwen3", "num_key_value_heads", None),
        ("qwen2", "sliding_window", None), ("qwen3", "sliding_window", None), ("qwen3_moe", "sliding_window", None),
        ("qwen3_moe", "mlp_only_layers", None), ("gpt_oss", "rope_scaling", {}), ("gpt_oss", "rope_parameters", {}),
        ("gpt_oss", "layer_types", None), ("gemma3_text", "layer_types", None), ("gemma3_text", "rope_scaling", {}),
        ("gemma3_text", "attention_dropout", None), ("gpt2", "n_inner", None),
    ],
)  # fmt: skip
def test_nulls_that_both_take(kind, name, value):
    """So that the comparison above compares something."""
    config = CONFIGS[kind] | {name: value}
    model = hf.from_config(config)
    assert oracle(kind, config) is not None
    if name == "sliding_window":  # none at all, and not the default of thousands of rows, which no short text shows
        assert [layer.form.window for layer in model.layers[1:-1]] == [None] * 2


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"])
def test_rows_that_yarn_slows_from_are_the_familys_where_nothing_says_them(kind):
    config = {name: value for name, value in CONFIGS[kind].items() if name != "max_position_embeddings"}
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0}
    config["rope_parameters"] = yarn if kind != "gemma3_text" else {"full_attention": yarn}
    made, logits = oracle(kind, config)
    assert (hf.from_config(config)(hf.load(made)[1], batch(1, 9)) - logits).abs().max() <= 1e-5


ODD = [
    None, "abc", "", [], [1], [[1]], {}, {"a": 1}, {1: 2}, -1, 0, 1, 1.5, -0.5, 10**7, 10**400, 10**5000, [10**5000],
    1e300, 1e-300, math.nan, math.inf, True, False, b"x", {"rope_type": ["yarn"]}, {"full_attention": "abc"},
    {"sliding_attention": [1]}, ["full_attention", ["sliding_attention"]],
]  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_odd_value_of_any_field_gets_further_than_its_reading(kind):
    @settings(max_examples=25)
    @given(st.dictionaries(st.sampled_from(read_fields(kind)), st.sampled_from(ODD), min_size=1, max_size=3))
    def check(fields):
        with suppress(ModelError):  # no other error, and in no time
            hf.from_config(CONFIGS[kind] | fields)

    check()


ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
    "yarn": {"factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": 1.0}
    | {"original_max_position_embeddings": 8},
}


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_no_odd_value_of_rotary_positions_gets_further_than_its_reading(kind):
    @settings(max_examples=25)
    @given(st.sampled_from(list(ROPES)), st.data())
    def check(rope, data):
        given_fields = {"rope_type": rope, "rope_theta": 100.0, **ROPES[rope]}
        name, value = data.draw(st.sampled_from(list(given_fields))), data.draw(st.sampled_from(ODD))
        parameters = given_fields | {name: value}
        parameters = {"full_attention": parameters} if kind == "gemma3_text" else parameters
        with suppress(ModelError):
            hf.from_config(CONFIGS[kind] | {"rope_parameters": parameters})

    check()


@pytest.mark.parametrize(
    ("kind", "fields", "needed"),
    [
        ("llama", {"hidden_act": ["silu"]}, "hidden_act is ['silu']; supported is 'gelu'"),
        (
            "qwen2",
            {"layer_types": [["full_attention"]] * 2},
            "layer_types is [['full_attention'], ['full_attention']];",
        ),
        ("llama", {"rope_theta": 10**400}, "rope_theta is 1000"),
        (
            "llama",
            {"rms_norm_eps": 10**5000},
            "rms_norm_eps is int of very many digits; it must be a positive number",
        ),
        ("llama", {"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; it must be at most 4096"),
        ("qwen3_moe", {"num_experts": 10**7}, "num_experts is 10000000; it must be at most 4096"),
        (
            "gpt_oss",
            {"num_local_experts": 4096, "num_hidden_layers": 64},
            "num_local_experts is 4096; in 64 layers",
        ),
        ("gpt_oss", {"num_experts": 3}, "num_local_experts is 2; supported is 3"),
        ("gemma3_text", {"rope_parameters": "abc"}, "rope_parameters is 'abc'; it must hold rope_type and its param"),
        ("gemma3_text", {"rope_parameters": {"full_attention": "abc"}}, "rope_parameters.full_attention is 'abc'; it"),
        ("gemma3_text", {"rope_scaling": [1]}, "rope_scaling is [1]; it must hold rope_type and its parameters"),
        ("gpt2", {"max_position_embeddings": 32}, "max_position_embeddings is 32; supported is 16"),
        (
            "llama",
            {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling.rope_theta is 1.0; it must be above 1 for yarn",
        ),
        (
            "gemma3_text",
            {"hidden_size": 18, "num_attention_heads": 4},
            "num_attention_heads is 4; hidden_size 18 must be a multiple of it, as transformers asks; head_dim sets a",
        ),
    ],
)
def test_odd_values_are_named(kind, fields, needed):
    with pytest.raises(ModelError, match="config") as caught:
        hf.from_config(CONFIGS[kind] | fields)
    assert needed in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "gpt2"])
@pytest.mark.parametrize("fields", [{}, {"head_dim": 4}], ids=["derived", "set"])
def test_widths_that_are_no_multiple_of_heads_are_taken_where_transformers_takes_them(kind, fields):
    config = CONFIGS[kind] | {"hidden_size": 14, "num_attention_heads": 3} | fields
    made = oracle(kind, config)
    if made is None:
        with pytest.raises(ModelError, match="hidden_size 14 must be a multiple"):
            hf.from_config(config)
    else:
        assert (hf.load(made[0])[0](hf.load(made[0])[1], batch(1, 9)) - made[1]).abs().max() <= 1e-5


@pytest.mark.parametrize("config", [None, 3, [], "llama", {1: 2}, {"model_type": "llama", 1: 2}])
def test_what_is_no_config(config):
    with pytest.raises(ModelError, match="config"):
        hf.from_config(config)


def test_a_config_object_is_taken():
    config = CONFIG_MAPPING["llama"].from_dict(CONFIGS["llama"])
    assert dict(hf.from_config(config).config) == config.to_dict()


@pytest.mark.parametrize("ignore", [None, "sliding_window", 3])
def test_what_is_no_list_of_fields(ignore):
    with pytest.raises(ModelError, match=r"ignore: is .*, needs a list of config fields"):
        inspect.unwrap(hf.from_config)(CONFIGS["llama"], ignore=ignore)  # without the tests' checks of types
