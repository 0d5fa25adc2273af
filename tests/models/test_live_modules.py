"""A live module trained by its own optimizer, with gradients from rpfunc: as with torch.autograd."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, batch, module, oracle, transformers

from rpfunc import optim, tree, value_and_grad
from rpfunc.models import hf
from rpfunc.objectives import sft
from rpfunc.testing.oracles import assert_close, gradient_error


def train(made, give_grads, steps=3):
    # plain descent: an optimizer that divides by gradients would magnify what is rounding in tiny ones
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        losses.append(give_grads(batch(2, 7, step)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_an_existing_loop_goes_on_working(family):
    @settings(max_examples=2)
    @given(FAMILIES[family](), st.integers(0, 9))
    def check(config, seed):
        theirs = module(config, seed)
        ours = copy.deepcopy(theirs)

        def autograd(rows):
            output = theirs(input_ids=rows.row["tokens"], labels=rows.row["labels"])
            output.loss.backward()
            return float(output.loss.detach())

        model, params = hf.load(ours)  # once: parameters share the module's memory
        gradient = value_and_grad(model, sft(), chunk=3)

        def rpfunc(rows):
            result, grads = gradient(params, rows)
            hf.write_grads(ours, grads)
            return float(result.loss)

        losses = train(ours, rpfunc)
        assert losses == pytest.approx(train(theirs, autograd), rel=1e-4)
        assert gradient_error(dict(ours.state_dict()), dict(theirs.state_dict())) <= 1e-4

    check()


def test_parameters_are_the_modules_and_cannot_be_donated():
    made = module(transformers.GPT2Config(vocab_size=17, n_embd=6, n_head=2, n_layer=1, bos_token_id=1, eos_token_id=1))
    _, params = hf.load(made)
    assert torch.equal(params["block0"]["attention"]["value"], made.transformer.h[0].attn.c_attn.weight[:, 12:].T)
    with torch.no_grad():
        made.transformer.h[0].attn.c_attn.weight.add_(1)
    assert torch.equal(params["block0"]["attention"]["value"], made.transformer.h[0].attn.c_attn.weight[:, 12:].T)
    assert not any(leaf.requires_grad for leaf in tree.leaves(params))


def test_mapped_parameters_cannot_be_donated(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    module(config).save_pretrained(tmp_path)
    transformation = optim.sgd(0.1)
    for mapped in (True, False):
        _, params = hf.load(tmp_path, mapped=mapped)
        grads = tree.map(torch.ones_like, params)
        if mapped:
            with pytest.raises(ValueError, match=r"is mapped from .*model\.safetensors; give a clone"):
                optim.step_donated(transformation, grads, transformation.init(params), params)
        else:
            optim.step_donated(transformation, grads, transformation.init(params), params)


@pytest.mark.parametrize("plan", ["F0:2 X2:4 B0:2", "F0:1 F1:3 X3:4 B1:3 B0:1"])
@pytest.mark.parametrize("workers", [None, 3])
def test_a_tied_table_collects_from_both_ends(plan, workers):
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True, pad_token_id=None,
    )  # fmt: skip
    made, rows = module(config), batch(4, 6)
    _, _, grads = oracle(made, rows)
    model, params = hf.load(made)
    _, found = value_and_grad(model, sft(), plan=plan, workers=workers, microbatches=2)(params, rows)
    assert "head" not in found
    assert_close([found["embedding"]], [grads["model.embed_tokens.weight"]], 1e-4)


def test_norms_may_be_wider_than_rows():
    config = transformers.GptOssConfig(
        vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    made, rows = module(config), batch(2, 5)
    wanted = oracle(made, rows)[0]
    model, params = hf.load(made.to(torch.bfloat16))
    params = {**params, "norm": params["norm"].float()}
    found = model(params, rows)
    assert found.dtype == torch.bfloat16
    assert (found - wanted).abs().max() <= 0.1 * wanted.abs().max()


def llama():
    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    return module(transformers.LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=None))


def test_parameters_that_require_no_gradient_get_none_and_are_not_trained():
    made, rows = llama(), batch(2, 5)
    made.model.embed_tokens.weight.requires_grad_(False)
    made.model.embed_tokens.weight.grad = torch.ones(17, 8)  # of a step before
    before = made.model.embed_tokens.weight.clone()
    model, params = hf.load(made)
    hf.write_grads(made, value_and_grad(model, sft())(params, rows)[1])
    assert [name for name, each in made.named_parameters() if each.grad is None] == ["model.embed_tokens.weight"]
    torch.optim.AdamW(made.parameters(), lr=0.1).step()
    assert torch.equal(made.model.embed_tokens.weight, before)


def test_whole_subtrees_may_be_frozen():
    made = llama()
    model, params = hf.load(made)
    hf.write_grads(made, {**value_and_grad(model, sft())(params, batch(2, 5))[1], "block0": None})
    assert all((each.grad is None) == ("layers.0." in name) for name, each in made.named_parameters())


def test_a_compiled_module_is_the_one_it_was_made_from():
    made, rows = llama(), batch(2, 5)
    compiled = torch.compile(made, backend="eager")
    model, params = hf.load(compiled)
    assert model(params, rows).equal(hf.load(made)[0](hf.load(made)[1], rows))
    hf.write_grads(compiled, value_and_grad(model, sft())(params, rows)[1])
    assert all(parameter.grad is not None for parameter in made.parameters())
