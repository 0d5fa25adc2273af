"""Experts: each has a gradient whatever the routing, whole or in chunks; routes and activations by their formulas."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import module, transformers

from rpfunc import Batch, optim, tree, value_and_grad
from rpfunc.models import feedforward, hf
from rpfunc.objectives import sft
from rpfunc.testing.oracles import assert_close, assert_equal_bits, gradient_error

WIDTH = 4


def parameters(num, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    experts = tuple(
        {"gate": draw(3, WIDTH), "up": draw(3, WIDTH), "up_bias": draw(3), "down": draw(WIDTH, 3)} for _ in range(num)
    )
    return {"router": draw(num, WIDTH), "router_bias": draw(num), "experts": experts}


def dense(params, x, num, normalize, pick_first):
    """Every expert on every row, one row after the other."""
    outputs = []
    for row in x.reshape(-1, WIDTH):
        logits = params["router"] @ row + params["router_bias"]
        values = logits.tolist()
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:num]
        scores = logits.exp()
        whole = sum(scores[i] for i in (order if pick_first or normalize else range(len(logits))))
        output = torch.zeros_like(row)
        for index in order:
            expert = params["experts"][index]
            gate = expert["gate"] @ row
            hidden = gate / (1 + torch.exp(-gate)) * (expert["up"] @ row + expert["up_bias"])
            output = output + scores[index] / whole * (expert["down"] @ hidden)
        outputs.append(output)
    return torch.stack(outputs).reshape(x.shape)


def mixture(num, normalize, pick_first):
    route = feedforward.pick_then_softmax(num) if pick_first else feedforward.softmax_then_pick(num, normalize)
    return feedforward.experts(route, feedforward.gated(torch.nn.functional.silu))


def gradients(function, params, x):
    leaves, structure = tree.flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    x = x.clone().requires_grad_()
    output = function(tree.unflatten(structure, leaves), x)
    weights = torch.arange(output.numel(), dtype=output.dtype).cos().reshape(output.shape)
    found = torch.autograd.grad((output * weights).sum(), [*leaves, x], allow_unused=True, materialize_grads=True)
    return output.detach(), list(found)


@given(st.integers(1, 6), st.data(), st.booleans(), st.booleans(), st.integers(1, 7), st.integers(0, 99))
def test_equal_every_expert_on_every_row(num_experts, data, normalize, pick_first, rows, seed):
    num = data.draw(st.integers(1, num_experts))
    params = parameters(num_experts, seed)
    x = torch.randn(1, rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    output, found = gradients(mixture(num, normalize, pick_first), params, x)
    wanted_output, wanted = gradients(lambda p, x: dense(p, x, num, normalize, pick_first), params, x)
    assert_close([output], [wanted_output], 1e-12)
    assert_close(found, wanted, 1e-10)


@pytest.mark.parametrize("pick_first", [True, False])
def test_equal_scores_go_to_the_first_expert_in_any_chunk(pick_first):
    params = parameters(5)
    params["router"], params["router_bias"] = torch.zeros(5, WIDTH).double(), torch.zeros(5).double()
    x = torch.randn(1, 9, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    function = mixture(2, True, pick_first)
    whole = function(params, x)
    assert_close([whole], [dense(params, x, 2, True, pick_first)], 1e-12)
    for chunk in range(1, 10):
        parts = [function(params, x[:, start : start + chunk]) for start in range(0, 9, chunk)]
        assert_close([torch.cat(parts, dim=1)], [whole], 1e-12)


def routed(config, places):
    """Returns a module whose router sends a row with token t to expert places[t]."""
    made = module(config)
    with torch.no_grad():
        made.model.embed_tokens.weight.zero_()
        made.model.embed_tokens.weight[range(4), range(4)] = 3.0
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.post_attention_layernorm.weight.fill_(1.0)
            layer.mlp.gate.weight.zero_()
            for token, place in enumerate(places):
                layer.mlp.gate.weight[place, token] = 5.0
    return made


@pytest.mark.parametrize("num_rows", [1, 2, 6])
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_experts_without_a_row_have_zero_gradients(num_rows, chunk):
    config = transformers.Qwen3MoeConfig(
        vocab_size=17, hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1, head_dim=4,
        num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=1, pad_token_id=None,
    )  # fmt: skip
    made = routed(config, (0, 1, 1, 3))
    model, params = hf.load(made)
    tokens = torch.tensor([[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 2, 1]])[:, :num_rows]
    rows = Batch(row={"tokens": tokens, "labels": tokens})
    if num_rows == 1:  # no label is left to predict: the loss, and every gradient, is zero
        _, grads = value_and_grad(model, sft(), chunk=chunk)(params, rows)
        assert not any(leaf.any() for leaf in tree.leaves(grads))
        return
    loss = made(input_ids=tokens, labels=tokens).loss
    loss.backward()
    _, grads = value_and_grad(model, sft(), chunk=chunk, microbatches=2)(params, rows)
    experts = grads["block0"]["mlp"]["experts"]
    assert [bool(expert["down"].any()) for expert in experts] == [True, True, False, False]
    assert {leaf.shape for leaf in tree.leaves(experts[3])} == {(8, 8)}
    hf.write_grads(made_again := routed(config, (0, 1, 1, 3)), grads)
    found, wanted = ({name: p.grad for name, p in each.named_parameters()} for each in (made_again, made))
    assert gradient_error(found, wanted) <= 1e-4
    apart = [value_and_grad(model, sft(), chunk=chunk)(params, rows.examples(i, i + 1))[1] for i in range(2)]
    assert_close(tree.map(lambda a, b: (a + b) / 2, *apart), grads, 1e-5)  # as many targets on either side


def test_adam_takes_an_unused_expert_as_one_with_gradient_zero():
    params = parameters(2, dtype=torch.float32)
    grads = tree.map(torch.zeros_like, params)
    transformation = optim.adamw(0.1, weight_decay=0.0)
    after, _ = optim.step(transformation, grads, transformation.init(params), params)
    assert_equal_bits(after, params)


@given(st.floats(0.1, 3.0), st.floats(0.5, 2.0), st.integers(0, 99))
def test_clamped(limit, gain, seed):
    params = parameters(1, seed)["experts"][0]
    x = 3 * torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    gate, up = x @ params["gate"].T, x @ params["up"].T + params["up_bias"]
    gate, up = torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, limit * up.sign(), up)
    wanted = (gate / (1 + torch.exp(-gain * gate)) * (up + 1)) @ params["down"].T
    assert_close([feedforward.clamped(gain, limit)(params, x)], [wanted], 1e-12)
