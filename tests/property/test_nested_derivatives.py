"""Derivatives of derivatives: kernels and derivatives of our own are right there too, or say that they are not."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracle import dense_attention

from rpfunc import Batch, Layer, Model, random, reference, tree, value_and_grad
from rpfunc.errors import ModelError
from rpfunc.objectives import IGNORED, sft
from rpfunc.objectives.logprob import cross_entropy
from rpfunc.stream import attend, opaque, rowwise
from rpfunc.testing import assert_close, assert_streams

VISIBLE = torch.tensor([[False, True, True, False, True, True, True], [True] * 7])
KINDS = {
    "plain": {},
    "window": {"window": 2},
    "padding": {"visible": VISIBLE},
    "cap": {"soft_cap": 2.0},
    "not causal": {"causal": False},
}


def normal(name, *shape):
    return random.normal(random.fold_in(random.key(0), name), shape, torch.float64)


def by_func(function, leaves):
    """The gradient of the squared gradient's sum, both by torch.func."""

    def squares(*leaves):
        grads = torch.func.grad(function, argnums=tuple(range(len(leaves))))(*leaves)
        return sum(leaf.square().sum() for leaf in grads)

    return torch.func.grad(squares, argnums=tuple(range(len(leaves))))(*leaves)


def by_autograd(function, leaves):
    """The same, the outer one by torch.autograd."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    grads = torch.func.grad(function, argnums=tuple(range(len(leaves))))(*leaves)
    return torch.autograd.grad(sum(leaf.square().sum() for leaf in grads), leaves)


def by_autograd_alone(function, leaves):
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    grads = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(sum(leaf.square().sum() for leaf in grads), leaves)


def forward_over_reverse(function, leaves):
    """A directional derivative of the gradient: with itself as the direction, half the gradient of its square."""
    gradient = torch.func.grad(function, argnums=tuple(range(len(leaves))))
    return tuple(2 * leaf for leaf in torch.func.jvp(gradient, tuple(leaves), gradient(*leaves))[1])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize("twice", [by_func, by_autograd, forward_over_reverse])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_queries", [1, 3, 7])
def test_attention(kind, num_queries, twice):
    options = KINDS[kind]
    leaves = normal(1, 2, num_queries, 4, 2), normal(2, 2, 7, 2, 2), normal(3, 2, 7, 2, 3)
    weights = normal(4, 2, num_queries, 4, 3)

    def energy(attend):
        return lambda *leaves: (attend(*leaves, **options) * weights).square().sum()

    found = twice(energy(attend), leaves)
    assert_close(found, by_autograd_alone(energy(dense_attention.attend), leaves), 1e-10)


@pytest.mark.parametrize("num_queries", [1, 3, 7])
def test_attentions_kernels_say_that_they_have_no_second_derivative(num_queries):
    leaves = normal(1, 2, num_queries, 4, 2), normal(2, 2, 7, 2, 2), normal(3, 2, 7, 2, 2)
    with pytest.raises((ModelError, RuntimeError), match=r"no second derivative|is not implemented"):
        by_autograd_alone(lambda *leaves: attend(*leaves).square().sum(), leaves)


@pytest.mark.parametrize("twice", [by_func, by_autograd, by_autograd_alone])
@given(st.integers(1, 5), st.sampled_from([0.0, 0.3]), st.integers(0, 1000))
def test_cross_entropy(twice, num_rows, smoothing, seed):
    logits = normal(seed, 2, num_rows, 4)
    targets = torch.randint(4, (2, num_rows), generator=torch.Generator().manual_seed(seed))
    targets[0, seed % num_rows] = IGNORED

    def dense(logits):
        flat = logits.flatten(0, 1), targets.flatten()
        return F.cross_entropy(*flat, label_smoothing=smoothing, reduction="sum", ignore_index=IGNORED).square()

    found = twice(lambda logits: cross_entropy(logits, targets, smoothing).sum().square(), (logits,))
    assert_close(found, by_autograd_alone(dense, (logits,)), 1e-10)


def test_the_yardstick_can_be_differentiated():
    """A Hessian-vector product of the loss, by a derivative of `reference`'s gradient."""
    tokens = torch.arange(12).view(2, 6) % 7
    batch = Batch(row={"tokens": tokens, "labels": tokens})
    model = Model(
        (
            Layer("embedding", rowwise(lambda p, x, batch: p[batch.row["tokens"]]), "table"),
            Layer("head", rowwise(lambda p, x, batch: x @ p.T), "head"),
        )
    )
    params = {"table": normal(1, 7, 4), "head": normal(2, 7, 4)}

    def dense(table, head):
        logits = table[tokens] @ head.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def squares(params):
        return sum(
            leaf.square().sum() for leaf in tree.leaves(reference.value_and_grad(model, sft())(params, batch)[1])
        )

    found = torch.func.grad(squares)(params)
    wanted = by_autograd_alone(dense, (params["table"], params["head"]))
    assert_close((found["table"], found["head"]), wanted, 1e-10)


def descends(attend):
    """A layer that steps down the gradient of an energy: of attention over two learnt rows and its own."""

    def step(p, x, batch):
        def energy(x):
            seen = torch.cat((p["memory"].expand(len(x), 2, 8), x @ p["key"]), dim=1)[:, :, None]
            return attend((x @ p["query"])[:, :, None], seen, seen).square().sum()

        return x - 0.1 * torch.func.grad(energy)(x)

    return opaque(step)


def test_a_layer_may_take_the_gradient_of_attention():
    params = {"table": normal(1, 11, 8) / 2, "block": {name: normal(name, 8, 8) / 2 for name in ("key", "query")}}
    params["block"]["memory"] = normal(2, 1, 2, 8)
    tokens = torch.arange(24).view(2, 12) % 11
    batch = Batch(row={"tokens": tokens, "labels": tokens})

    def model(attend):
        embedding = Layer("embedding", rowwise(lambda p, x, batch: p[batch.row["tokens"]]), "table")
        head = Layer("head", rowwise(lambda p, x, batch: x @ p.T), "table")
        return Model((embedding, Layer("block", descends(attend), "block"), head))

    result, grads = value_and_grad(model(attend), sft(), chunk=5, workers=2)(params, batch)
    loss, wanted = reference.value_and_grad(model(dense_attention.attend), sft())(params, batch)
    assert_close({"loss": result.loss, "grads": grads}, {"loss": loss, "grads": wanted}, 1e-10)
    assert_streams(descends(attend), params["block"], normal(3, 2, 6, 8), Batch(row={"x": normal(3, 2, 6)}), draws=4)


@pytest.mark.parametrize("frozen", [None, {"table": False, "head": True}])
def test_a_head_of_few_rows_may_take_a_gradient(frozen):
    """float32 and large, so that products with the weight are oneDNN's."""
    table, weight = (random.normal(random.key(seed), (2048, 512)) / 20 for seed in (1, 2))
    tokens = torch.arange(10)[None]
    batch = Batch(row={"tokens": tokens, "labels": tokens})

    def model(linear):
        def head(p, x, batch):
            return linear(x - 0.01 * torch.func.grad(lambda x: linear(x, p).square().sum())(x), p)

        embedding = Layer("embedding", rowwise(lambda p, x, batch: p[batch.row["tokens"]]), "table")
        return Model((embedding, Layer("head", rowwise(head), "head")))

    params = {"table": table, "head": weight}
    _, grads = value_and_grad(model(F.linear), sft(), chunk=5, frozen=frozen)(params, batch)
    wide = tree.map(torch.Tensor.double, params)
    _, wanted = reference.value_and_grad(model(lambda x, weight: x @ weight.T), sft())(wide, batch)
    names = [name for name in params if grads[name] is not None]
    assert_close({n: grads[n].double() for n in names}, {n: wanted[n] for n in names}, 1e-5)
