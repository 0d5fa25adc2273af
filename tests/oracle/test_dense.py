"""The yardstick itself against dense layers written independently, in float64."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from oracle import dense

from rpfunc import Batch, Layer, Model, random, reference, tree
from rpfunc.models import decoder, mlp
from rpfunc.objectives import Objective, sft
from rpfunc.stream import attend, attending, rowwise
from rpfunc.testing import assert_close

TOLERANCE = 1e-10
HEADS = [(1, 1), (2, 1), (4, 2), (3, 3)]


def noisy(params, seed):
    """Biases and norms away from 0 and 1, so that dropping one shows."""
    leaves, structure = tree.flatten(params)
    keys = random.split(random.key(seed), len(leaves))
    noise = [random.normal(key, tuple(leaf.shape), leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return tree.unflatten(structure, [leaf + 0.3 * part for leaf, part in zip(leaves, noise, strict=True)])


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("qk_norm", "bias", "tied"), list(product([False, True], repeat=3)))
def test_decoder_equals_the_dense_one(heads, kv_heads, qk_norm, bias, tied):
    config = decoder.DecoderConfig(
        vocabulary=7, width=6, layers=2, heads=heads, kv_heads=kv_heads, head_size=4, mlp_width=5,
        rope_theta=100.0, norm_epsilon=1e-3, qk_norm=qk_norm, bias=bias, tied=tied,
    )  # fmt: skip
    params = noisy(decoder.init(config, random.key(0), torch.float64), heads)
    tokens, labels = torch.randint(0, 7, (2, 2, 5), generator=torch.Generator().manual_seed(0))
    labels[0, 3], labels[1, 0] = -100, -100
    found = reference.value_and_grad(decoder.model(config), sft())(
        params, Batch(row={"tokens": tokens, "labels": labels})
    )
    wanted = dense.value_and_grad(
        lambda params: dense.next_token_loss([dense.decoder_logits(params, row, config) for row in tokens], labels),
        params,
    )
    assert_close({"loss": found[0]}, {"loss": wanted[0]}, TOLERANCE)
    assert_close(found[1], wanted[1], TOLERANCE)


@pytest.mark.parametrize("activation", ["relu", "square", "tanh"])
@pytest.mark.parametrize("widths", [(3, 4), (3, 4, 5, 4)])
def test_perceptron_equals_the_dense_one(widths, activation):
    config = mlp.MlpConfig(widths, activation)
    params = noisy(mlp.init(config, random.key(0), torch.float64), 1)
    features = random.normal(random.key(2), (2, 5, 3), torch.float64)
    labels = torch.tensor([[0, 1, 2, -100, 3], [3, 3, -100, 0, 1]])
    batch = Batch(row={"features": features, "labels": labels})
    found = reference.value_and_grad(mlp.model(config), sft())(params, batch)
    wanted = dense.value_and_grad(
        lambda params: dense.next_token_loss(dense.mlp_outputs(params, features, activation), labels), params
    )
    assert_close({"loss": found[0]}, {"loss": wanted[0]}, TOLERANCE)
    assert_close(found[1], wanted[1], TOLERANCE)


def test_polynomial_attention_equals_the_dense_one():
    def kv(params, x, batch):
        return batch.row["x"] @ params["key"].mT, batch.row["x"] @ params["value"].mT

    def rows(params, x, kv, batch):
        scores = (batch.row["x"] @ params["query"].mT) @ kv[0].mT
        return batch.row["x"] + scores.tril(kv[0].shape[1] - batch.num_rows) @ kv[1]

    head = rowwise(lambda weight, x, batch: x @ weight.mT)
    model = Model((Layer("attention", attending(kv, rows), "attention"), Layer("head", head, "head")))
    mean_logit = Objective(
        "mean_logit",
        prepare=lambda batch: batch,
        total=lambda batch: torch.tensor(float(batch.num_examples * batch.num_rows), dtype=torch.float64),
        score=lambda logits, batch: logits.gather(-1, batch.row["labels"].unsqueeze(-1)).squeeze(-1),
        loss=lambda sums, batch, total: sums.sum() / total,
    )
    drawn = random.normal(random.key(0), (4, 3, 3), torch.float64)
    params = {"attention": dict(zip(("query", "key", "value"), drawn[:3], strict=True)), "head": drawn[3]}
    x = random.normal(random.key(1), (2, 5, 3), torch.float64)
    labels = torch.randint(0, 3, (2, 5), generator=torch.Generator().manual_seed(0))
    found = reference.value_and_grad(model, mean_logit)(params, Batch(row={"x": x, "labels": labels}))
    wanted = dense.value_and_grad(lambda params: dense.polynomial_attention_loss(params, x, labels), params)
    assert_close({"loss": found[0]}, {"loss": wanted[0]}, TOLERANCE)
    assert_close(found[1], wanted[1], TOLERANCE)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_attend_equals_dense_attention_head_by_head(heads, kv_heads):
    query = random.normal(random.key(0), (2, 5, heads, 4), torch.float64)
    key, value = random.normal(random.key(1), (2, 2, 5, kv_heads, 4), torch.float64)
    found = attend(query, key, value)
    for example, head in product(range(2), range(heads)):
        shared = head * kv_heads // heads
        wanted = dense.attention(query[example, :, head], key[example, :, shared], value[example, :, shared])
        assert_close(found[example, :, head], wanted, TOLERANCE)


def test_dense_formulas_equal_torch_functions():
    x, gate = random.normal(random.key(0), (2, 4, 6), torch.float64)
    scale = random.normal(random.key(1), (6,), torch.float64)
    assert_close(dense.rms_norm(x, scale, 1e-5), F.rms_norm(x, (6,), scale, 1e-5), TOLERANCE)
    assert_close(gate / (1 + torch.exp(-gate)), F.silu(gate), TOLERANCE)
    wanted = F.scaled_dot_product_attention(x[None, None], gate[None, None], x[None, None], is_causal=True)[0, 0]
    assert_close(dense.attention(x, gate, x), wanted, TOLERANCE)
    labels = torch.tensor([[0, 5, -100, 2]])
    wanted = F.cross_entropy(x[:-1], labels[0, 1:], ignore_index=-100)
    assert_close(dense.next_token_loss([x], labels), wanted, TOLERANCE)


def test_rope_scores_depend_on_distance_alone():
    query, key = random.normal(random.key(0), (2, 1, 4), torch.float64)
    turned = [dense.rotate(x.expand(6, 4), 100.0) for x in (query, key)]
    scores = turned[0] @ turned[1].T
    assert_close(scores[1:, 1:], scores[:-1, :-1], TOLERANCE)
    assert_close(decoder.rotate(query.expand(6, 4)[None, 2:, None], 2, 100.0)[0, :, 0], turned[0][2:], TOLERANCE)
