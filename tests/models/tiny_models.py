"""Random tiny models of transformers, drawn within each family, and what they compute: the oracle of tests/models."""

import pytest
import torch
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'rpfunc[hf]'")

from rpfunc import Batch  # noqa: E402

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCABULARY = 17


@st.composite
def sizes(draw, *, divides=False, head_dim=True):
    """Sizes that share no factor by chance: head_dim is not hidden / heads, hidden is odd or equals intermediate."""
    kv_heads, groups = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    heads = kv_heads * groups
    hidden = draw(st.sampled_from([heads * 2, heads * 4] if divides else [5, 8, 12]))
    found = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": draw(st.sampled_from([hidden, 7, 12])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": draw(st.sampled_from([None, 0, VOCABULARY - 1])),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 64,
    }
    if head_dim:
        found["head_dim"] = draw(st.sampled_from([2, 6]))
    return found


@st.composite
def ropes(draw, *, truncate=True):
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    found = {"rope_type": kind, "rope_theta": draw(st.sampled_from([100.0, 10_000.0]))}
    if kind != "default":
        found["factor"] = draw(st.sampled_from([1.5, 4.0]))
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    if kind == "yarn":
        found |= {"original_max_position_embeddings": 16, "truncate": draw(st.booleans()) if truncate else True}
        found |= draw(st.sampled_from([{}, {"attention_factor": 1.25}, {"beta_fast": 4.0, "beta_slow": 0.5}]))
    return found


@st.composite
def llama(draw):
    return transformers.LlamaConfig(
        **draw(sizes(divides=True)),
        rope_parameters=draw(ropes()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        hidden_act=draw(st.sampled_from(["silu", "gelu", "relu", "gelu_pytorch_tanh", "gelu_new"])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-2])),
    )


@st.composite
def mistral(draw):
    window = draw(st.sampled_from([None, 1, 3, 50]))
    return transformers.MistralConfig(**draw(sizes()), rope_parameters=draw(ropes()), sliding_window=window)


@st.composite
def qwen2(draw):
    found = draw(sizes(head_dim=False))
    found["hidden_size"] = found["num_attention_heads"] * draw(st.sampled_from([2, 6]))
    windows = {"use_sliding_window": draw(st.booleans()), "sliding_window": 3}
    return transformers.Qwen2Config(**found, **windows, max_window_layers=draw(st.integers(0, 2)))


@st.composite
def qwen3(draw):
    windows = {"use_sliding_window": draw(st.booleans()), "sliding_window": 2}
    bias = draw(st.booleans())
    return transformers.Qwen3Config(
        **draw(sizes()), **windows, max_window_layers=1, rope_parameters=draw(ropes()), attention_bias=bias
    )


@st.composite
def qwen3_moe(draw):
    num = draw(st.integers(1, 5))
    return transformers.Qwen3MoeConfig(
        **draw(sizes()),
        num_experts=num,
        num_experts_per_tok=draw(st.integers(1, num)),
        moe_intermediate_size=draw(st.sampled_from([5, 8])),
        norm_topk_prob=draw(st.booleans()),
        decoder_sparse_step=draw(st.integers(1, 2)),
        mlp_only_layers=draw(st.sampled_from([[], [0]])),
        use_sliding_window=draw(st.booleans()),
        sliding_window=3,
        attention_bias=draw(st.booleans()),
    )


@st.composite
def gemma3(draw):
    found = draw(sizes(divides=True))
    kinds = ["sliding_attention", "full_attention"]
    rope = {
        "full_attention": draw(ropes(truncate=False)),
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    return transformers.Gemma3TextConfig(
        **found,
        layer_types=draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=3))[: found["num_hidden_layers"]],
        sliding_window=draw(st.integers(1, 4)),
        query_pre_attn_scalar=draw(st.sampled_from([4, 9])),
        final_logit_softcapping=draw(st.sampled_from([None, 2.0])),
        attention_bias=draw(st.booleans()),
        rope_parameters=rope,
    )


@st.composite
def gpt_oss(draw):
    num = draw(st.integers(1, 4))
    return transformers.GptOssConfig(
        **draw(sizes()),
        num_local_experts=num,
        num_experts_per_tok=draw(st.integers(1, num)),
        sliding_window=draw(st.integers(1, 4)),
        swiglu_limit=draw(st.sampled_from([0.2, 7.0])),
        attention_bias=draw(st.booleans()),
        rope_parameters=draw(st.sampled_from([None, {"rope_type": "default", "rope_theta": 1000.0}])),
    )


@st.composite
def gpt2(draw):
    heads = draw(st.integers(1, 3))
    width = heads * draw(st.sampled_from([3, 4]))
    return transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=width,
        n_head=heads,
        n_layer=draw(st.integers(1, 3)),
        n_positions=16,
        n_inner=draw(st.sampled_from([None, width, 3 * width])),
        bos_token_id=1,
        eos_token_id=1,
        tie_word_embeddings=draw(st.booleans()),
        scale_attn_weights=draw(st.booleans()),
        scale_attn_by_inverse_layer_idx=draw(st.booleans()),
        activation_function=draw(st.sampled_from(["gelu_new", "relu"])),
    )


FAMILIES = {
    "llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe, "gemma3": gemma3,
    "gpt_oss": gpt_oss, "gpt2": gpt2,
}  # fmt: skip


def module(config, seed=0):
    """Returns a live module with random weights, norms and biases included; eager attention and experts, float32."""
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return made


def batch(num_examples, num_rows, seed=0):
    """Returns tokens, the padding token among them, and labels of which some are not predicted."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num_examples, num_rows), generator=generator)
    unlabelled = torch.rand(tokens.shape, generator=generator) < 0.2
    unlabelled[:, 1] = False
    return Batch(row={"tokens": tokens, "labels": tokens.masked_fill(unlabelled, -100)})


def oracle(made, given):
    """Returns (logits, loss, gradient of each parameter by name), as transformers and torch.autograd have them."""
    made.zero_grad()
    output = made(input_ids=given.row["tokens"], labels=given.row["labels"])
    output.loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in made.named_parameters()}
    made.zero_grad()
    return output.logits.detach(), output.loss.detach(), {name: grad.detach().clone() for name, grad in grads.items()}


def module_grads(made):
    """Returns what lies in the module's `.grad`."""
    return {name: parameter.grad for name, parameter in made.named_parameters()}
