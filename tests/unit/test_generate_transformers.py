"""Greedy generation equals transformers' for a Llama built from the same weights, padded or not."""

import pytest
import torch
import torch.nn.functional as F

from rpfunc import Layer, Model, random
from rpfunc.generation import generate
from rpfunc.models import decoder
from rpfunc.stream import attend, attending, rowwise

transformers = pytest.importorskip("transformers")

CONFIG = decoder.DecoderConfig(
    vocabulary=50, width=24, layers=2, heads=4, kv_heads=2, head_size=8, mlp_width=40, tied=False, deviation=None
)
PARTS = {
    "attention.norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def params():
    params = decoder.init(CONFIG, random.key(4))
    params["head"] = params["head"] * 50  # logits far apart: no choice hangs on rounding
    return params


@pytest.fixture(scope="module")
def llama(params):
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, attn_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    state = {"model.embed_tokens.weight": params["embedding"], "model.norm.weight": params["norm"]}
    state["lm_head.weight"] = params["head"]
    for index in range(2):
        for ours, theirs in PARTS.items():
            part, name = ours.split(".")
            state[f"model.layers.{index}.{theirs}.weight"] = params[f"block{index}"][part][name]
    model.load_state_dict(state)
    return model


def theirs(llama, prompts, num_tokens, stop=None):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
    return llama.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()


def random_prompts(lengths, seed):
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 50, (length,), generator=drawn).tolist() for length in lengths]


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_greedy_tokens_are_those_of_transformers(llama, params, chunk):
    prompts = random_prompts([7] * 4, seed=0)
    found = generate(decoder.model(CONFIG), params, prompts, 12, chunk=chunk)
    assert [text.tolist() for text in found] == theirs(llama, prompts, 12)
    assert len({token for text in found for token in text.tolist()}) > 10


def test_stop_tokens_end_a_text_where_transformers_ends_it(llama, params):
    prompts = random_prompts([5] * 6, seed=1)
    free = theirs(llama, prompts, 12)
    stop = [free[0][3], free[1][7]]
    found = [text.tolist() for text in generate(decoder.model(CONFIG), params, prompts, 12, stop=stop)]
    for ours, other in zip(found, theirs(llama, prompts, 12, stop), strict=True):
        assert other == ours + [0] * (len(other) - len(ours))  # they fill up with padding
        assert ours[-1] in stop or len(ours) == 12
    assert min(map(len, found)) < 12


def padded_llama():
    """The same Llama, with positions and visibility read from the batch."""

    def norm(x, scale):
        return F.rms_norm(x, (24,), scale, 1e-5)

    def turned(x, batch):
        halves = torch.complex(*x.double().chunk(2, dim=-1))
        rows = torch.arange(batch.first_row, batch.first_row + batch.num_rows).expand(batch.num_examples, -1)
        angles = batch.row.get("positions", rows)[..., None, None] * 10_000.0 ** -(torch.arange(4).double() / 4)
        halves = halves * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((halves.real, halves.imag), dim=-1).to(x.dtype)

    def kv(p, x, batch):
        hidden = norm(x, p["attention"]["norm"])
        key, value = ((hidden @ p["attention"][part].mT).unflatten(-1, (2, 8)) for part in ("key", "value"))
        visible = batch.row.get("visible", torch.ones(x.shape[:2], dtype=torch.bool))
        return {"key": turned(key, batch), "value": value, "visible": visible}

    def rows(p, x, kv, batch):
        query = norm(x, p["attention"]["norm"]) @ p["attention"]["query"].mT
        attended = attend(turned(query.unflatten(-1, (4, 8)), batch), kv["key"], kv["value"], visible=kv["visible"])
        x = x + attended.flatten(-2) @ p["attention"]["output"].mT
        hidden = norm(x, p["mlp"]["norm"])
        return x + (F.silu(hidden @ p["mlp"]["gate"].mT) * (hidden @ p["mlp"]["up"].mT)) @ p["mlp"]["down"].mT

    def head(p, x, batch):
        return norm(x, p["norm"]) @ p["weight"].mT

    embedding = Layer("embedding", rowwise(lambda p, x, batch: p[batch.row["tokens"]]), "embedding")
    blocks = [Layer(f"block{index}", attending(kv, rows), f"block{index}") for index in range(2)]
    return Model((embedding, *blocks, Layer("head", rowwise(head), {"norm": "norm", "weight": "head"})))


@pytest.mark.parametrize("chunk", [None, 4])
def test_left_padded_prompts_give_the_tokens_that_transformers_gives(llama, params, chunk):
    prompts = random_prompts([2, 9, 5, 1], seed=2)
    found = generate(padded_llama(), params, prompts, 12, chunk=chunk)
    assert [text.tolist() for text in found] == theirs(llama, prompts, 12)
    assert [text.tolist() for text in found] == [theirs(llama, [prompt], 12)[0] for prompt in prompts]
