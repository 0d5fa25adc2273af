"""What a model reads beside its parameters: whole numbers, that it has rows for."""

import pytest
import torch
from tiny_models import module, transformers

from rpfunc import Batch, value_and_grad
from rpfunc.errors import BatchError
from rpfunc.models import hf
from rpfunc.objectives import sft

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 0]])
MODELS = {
    "gpt2": transformers.GPT2Config(
        vocab_size=17, n_embd=8, n_head=2, n_layer=1, n_positions=16, bos_token_id=1, eos_token_id=2
    ),
    "llama": transformers.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    ),
}


@pytest.fixture(params=MODELS)
def loaded(request):
    return hf.load(module(MODELS[request.param]))


def refusals(loaded, row):
    """Returns what the model and its gradient, whole and in chunks, say of these row leaves."""
    model, params = loaded
    given = Batch(row={**row, "labels": TOKENS})
    for call in (model, value_and_grad(model, sft()), value_and_grad(model, sft(), chunk=2)):
        with pytest.raises(BatchError, match="row leaf") as caught:
            call(params, given)
        yield str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int16, torch.bfloat16])
@pytest.mark.parametrize("name", ["tokens", "positions"])
def test_leaves_of_other_numbers(loaded, name, dtype):
    row = {"tokens": TOKENS, "positions": TOKENS}
    for text in refusals(loaded, row | {name: row[name].to(dtype)}):
        assert f"row leaf '{name}' is {dtype} (2, " in text
        assert text.endswith("int64 (B, T) is needed")


def test_tokens_that_are_missing_or_of_another_shape(loaded):
    for text in refusals(loaded, {"words": TOKENS}):
        assert text == "batch: has no row leaf 'tokens', which the model reads; int64 (B, T) is needed"
    for text in refusals(loaded, {"tokens": TOKENS[..., None]}):
        assert "row leaf 'tokens' is torch.int64 (2, " in text


@pytest.mark.parametrize("place", [-1, 16, -(2**40), 2**40])
def test_positions_that_a_model_of_learned_ones_does_not_have(place):
    positions = torch.tensor([[0, 1, 2], [0, 1, place]])
    for text in refusals(hf.load(module(MODELS["gpt2"])), {"tokens": TOKENS, "positions": positions}):
        assert text == f"batch: row leaf 'positions' holds {place}; the model's are 0 to 15"


@pytest.mark.parametrize(
    ("name", "own"),
    [("input_ids", "'tokens'"), ("attention_mask", "'visible', booleans"), ("position_ids", "'positions'")],
)
def test_leaves_under_transformers_names_are_refused_and_not_passed_over(loaded, name, own):
    for told in refusals(loaded, {"tokens": TOKENS, name: TOKENS}):
        assert told == f"batch: row leaf {name!r} is not read, give {own}"
