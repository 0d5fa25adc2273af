"""What passes between layers is contiguous, both ways and in every plan: strides, too, decide how kernels round."""

import pytest
import torch
from torch.autograd import Function

from rpfunc import Batch, Layer, Model, value_and_grad
from rpfunc.objectives import sft
from rpfunc.stream import rowwise
from rpfunc.testing import assert_equal_bits, strategies

WIDTH, VOCABULARY, ROWS = 48, 50, 10
PLANS = strategies.every_plan(5)


class Witness(Function):
    """Notes whether what comes in, forward and backward, is contiguous; hands both on with other strides."""

    @staticmethod
    def forward(x, note):
        return x.mT.contiguous().mT

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.note = inputs
        ctx.note(x.is_contiguous())

    @staticmethod
    def backward(ctx, cotangent):
        ctx.note(cotangent.is_contiguous())
        return cotangent.mT.contiguous().mT, None


def strided(seen):
    return rowwise(lambda p, x, batch: Witness.apply(x, seen.append))


def linear(p, x, batch):
    return x @ p


def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = {"table": (VOCABULARY, WIDTH), "one": (WIDTH, WIDTH), "head": (WIDTH, VOCABULARY)}
    return {name: torch.randn(*shape, generator=generator) / 6 for name, shape in shapes.items()}


PARAMS = parameters()
TOKENS = torch.arange(3 * ROWS).reshape(3, ROWS) * 7 % VOCABULARY
BATCH = Batch(row={"tokens": TOKENS, "labels": TOKENS})
WAYS = [{}, {"recompute": False}, {"chunk": 4}, {"chunk": 4, "head_chunk": 3}, {"chunk": 100}]
WAYS += [{"chunk": 4, "order": "chunk"}, {"chunk": 100, "order": "chunk"}]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_layers_with_other_strides_meet_contiguous_tensors_and_have_the_same_bits_in_every_plan(how):
    seen = []
    model = Model(
        (
            Layer("embedding", rowwise(lambda p, x, batch: p[batch.row["tokens"]]), "table"),
            Layer("first", strided(seen)),
            Layer("second", strided(seen)),
            Layer("linear", rowwise(linear), "one"),
            Layer("head", rowwise(linear), "head"),
        )
    )
    runs = []
    for plan in PLANS[::6]:
        result, grads = value_and_grad(model, sft(), plan=plan, **how)(PARAMS, BATCH)
        runs.append({"loss": result.loss, **grads})
    for run in runs[1:]:
        assert_equal_bits(run, runs[0])
    assert len(seen) >= 4 * len(runs)
    assert all(seen)
