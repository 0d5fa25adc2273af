"""A large table's gradient is kept as rows for a while: of this nothing shows, by any way of running."""

import pytest
import torch
import torch.nn.functional as F

from rpfunc import Batch, Cpu, Layer, Link, Model, memory, plan, tree, value_and_grad
from rpfunc.objectives import sft
from rpfunc.stream import rowwise
from rpfunc.stream.few_rows import LARGE
from rpfunc.testing import assert_equal, assert_equal_bits, exact

WIDTH = 8
VOCABULARY = LARGE // WIDTH
LAYERS = (
    Layer("embed", rowwise(lambda p, x, batch: F.embedding(batch.row["tokens"], p)), "table"),
    Layer("square", rowwise(lambda p, x, batch: F.linear(x, p).square()), "weight"),
)
TIED = Model((*LAYERS, Layer("head", rowwise(lambda p, x, batch: F.linear(x, p)), "table")))
UNTIED = Model((*LAYERS, Layer("head", rowwise(lambda p, x, batch: F.linear(x, p)), "small")))
MODELS = {"tied": TIED, "untied": UNTIED}


def make_params(model, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = {"table": (VOCABULARY, WIDTH), "weight": (WIDTH, WIDTH), "small": (30, WIDTH)}
    names = sorted({name for layer in model.layers for name in layer.subtrees})
    return {name: torch.randint(-1, 2, shapes[name], generator=generator).to(dtype) for name in names}


def make_batch(examples, rows):
    tokens = torch.arange(examples * rows).reshape(examples, rows) * 7 % 30  # some twice, none above 29
    return Batch(row={"tokens": tokens, "labels": tokens.flip(1)}, example={"weight": torch.ones(examples).double()})


def plain(model, params, batch):
    tracked = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    objective = exact.linear()
    total = objective.total(objective.prepare(batch))
    loss = objective.loss(objective.score(model(tracked, batch), batch).double().sum(1), batch, total)
    return dict(zip(tracked, torch.autograd.grad(loss, tracked.values()), strict=True))


WAYS = [
    {},
    {"chunk": 2, "head_chunk": 1},
    {"chunk": 2, "order": "chunk"},
    {"microbatches": 3},
    {"microbatches": 4, "blocks": 2, "chunk": 3},
    {"plan": "F0:2 X2:3 B0:1 B1:2", "workers": 2, "microbatches": 4, "blocks": 4},
    {"plan": "F0:2 X2:3 B0:1 B1:2", "workers": [Cpu(link=Link(disorder=1))] * 2, "microbatches": 3, "chunk": 2},
    {"recompute": "none", "microbatches": 2},
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_are_whole_tensors_and_exact(name, way):
    model = MODELS[name]
    params, batch = make_params(model), make_batch(4, 5)
    _, grads = value_and_grad(model, exact.linear(), **way)(params, batch)
    assert all(type(leaf) is torch.Tensor and leaf.is_contiguous() for leaf in tree.leaves(grads))
    assert_equal(grads, plain(model, params, batch))


@pytest.mark.parametrize("how", [{"microbatches": 1, "chunk": 2}, {"microbatches": 4, "blocks": 2}], ids=str)
def test_bits_do_not_depend_on_who_works(how):
    params, batch = make_params(TIED, torch.float32), make_batch(4, 5)
    params["table"] += torch.linspace(0, 1, VOCABULARY)[:, None]
    wanted = value_and_grad(TIED, exact.linear(), **how)(params, batch)[1]
    for disorder in range(3):
        workers = [Cpu(), Cpu(link=Link(disorder=disorder))]
        found = value_and_grad(TIED, exact.linear(), plan="F0:2 X2:3 B0:1 B1:2", workers=workers, **how)(params, batch)
        assert_equal_bits(found[1], wanted)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS[:4], ids=str)
def test_the_predicted_peak_is_the_measured_one(name, way):
    model = MODELS[name]
    params, batch = make_params(model, torch.float32), make_batch(6, 100 if name == "untied" else 5)
    function = value_and_grad(model, sft(), **way)
    function(params, batch)
    measured = memory.peak(lambda: function(params, batch)).peak_bytes
    assert plan.memory(model, sft(), params, batch, **way) == pytest.approx(measured, rel=0.1)


def test_one_microbatch_holds_one_gradient_of_a_tied_table():
    params, batch = make_params(TIED, torch.float32), make_batch(1, 1)
    function = value_and_grad(TIED, sft())
    function(params, batch)
    table = params["table"].nbytes
    # beside it, a row of logits and what follows from it: each an eighth of the table
    assert memory.peak(lambda: function(params, batch)).peak_bytes < 1.8 * table
