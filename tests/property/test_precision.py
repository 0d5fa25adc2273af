"""Smooth layers: the error against the plain gradient stays within what the dtype allows."""

import pytest
import torch

from rpfunc import Batch, Layer, Model, Plan, random, reference, tree, value, value_and_grad
from rpfunc.errors import OptionsError
from rpfunc.models import decoder
from rpfunc.objectives import Objective, sft
from rpfunc.stream import attending, rowwise
from rpfunc.testing import assert_computes, gradient_error

NUM_ROWS = 6
CONFIG = decoder.DecoderConfig(
    vocabulary=11, width=8, layers=2, heads=4, kv_heads=2, head_size=4, mlp_width=6, qk_norm=True, bias=True
)
MODEL = decoder.model(CONFIG)
SUM = Objective(
    "sum",
    prepare=lambda batch: batch,
    total=lambda batch: torch.tensor(1.0, dtype=torch.float64),
    score=lambda output, batch: output.sum(-1),
    loss=lambda sums, batch, total: sums.sum() / total,
)


def batch_of(num_examples, num_rows):
    tokens, labels = torch.randint(0, 11, (2, num_examples, num_rows), generator=torch.Generator().manual_seed(0))
    labels[:, 0], labels[0, 2] = -100, -100
    return Batch(row={"tokens": tokens, "labels": labels})


def plan_of(index):
    return (None, Plan.parse("F0:3 X3:4 B0:1 B1:3"), Plan.parse("F0:1 F1:2 X2:4 B0:2"))[index % 3]


@pytest.mark.parametrize("chunk", [None, *range(1, NUM_ROWS + 6)])
def test_float64_decoders_are_within_1e_10(chunk):
    params = decoder.init(CONFIG, random.key(0), torch.float64)
    index = chunk or 0
    function = value_and_grad(
        MODEL, sft(), chunk=chunk, microbatches=1 + index % 3, workers=1 + index % 2, plan=plan_of(index)
    )
    assert_computes(function, MODEL, sft(), params, batch_of(3, NUM_ROWS), tolerance=1e-10)


@pytest.mark.parametrize("chunk", [None, 1, 2, NUM_ROWS - 1, NUM_ROWS, NUM_ROWS + 5])
def test_float32_decoders_are_within_1e_5(chunk):
    params, index = decoder.init(CONFIG, random.key(1)), chunk or 0
    function = value_and_grad(MODEL, sft(), chunk=chunk, microbatches=2, workers=2, plan=plan_of(index))
    assert_computes(function, MODEL, sft(), params, batch_of(3, NUM_ROWS), tolerance=1e-5)


@pytest.mark.parametrize(("chunk", "num_microbatches"), [(None, 1), (None, 4), (1, 2), (3, 1), (16, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_decoders_err_at_most_twice_as_much_as_plain_torch(seed, chunk, num_microbatches):
    config = decoder.DecoderConfig(
        vocabulary=11, width=8, layers=1, heads=2, kv_heads=1, head_size=4, mlp_width=8, tied=seed % 2 == 0
    )
    model, batch = decoder.model(config), batch_of(4, 32)
    params = decoder.init(config, random.key(seed), torch.bfloat16)
    _, exact = reference.value_and_grad(model, sft())(tree.map(torch.Tensor.double, params), batch)
    _, plain = reference.value_and_grad(model, sft())(params, batch)
    _, found = value_and_grad(model, sft(), chunk=chunk, microbatches=num_microbatches)(params, batch)
    assert gradient_error(found, exact) <= 2 * gradient_error(plain, exact)


def test_bfloat16_head_gradients_keep_small_contributions_of_many_chunks():
    """A sum in bfloat16 would stop growing at 256 times its addend."""
    num_rows = 1024
    model = Model((Layer("head", rowwise(lambda w, x, batch: batch.row["x"] * w), "w"),))
    batch = Batch(row={"x": torch.ones(1, num_rows, 1, dtype=torch.bfloat16)})
    _, grads = value_and_grad(model, SUM, chunk=1)({"w": torch.ones(1, dtype=torch.bfloat16)}, batch)
    assert grads["w"].dtype == torch.float32
    assert grads["w"].item() == num_rows


@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16_keys_and_values_keep_small_contributions_of_many_chunks(causal):
    """Each row adds 1 to the cotangent of the first row's kv; plain torch sums them in one go."""
    num_rows = 768

    def rows(params, x, kv, batch):
        return x + kv[:, :1]

    attends = Layer("attend", attending(lambda params, x, batch: x * params, rows, causal=causal), "scale")
    model = Model(
        (Layer("source", rowwise(lambda w, x, batch: batch.row["x"] * w), "w"), attends, Layer("sum", rowwise(given)))
    )
    params = {name: torch.ones(1, dtype=torch.bfloat16) for name in ("w", "scale")}
    batch = Batch(row={"x": torch.ones(1, num_rows, 1, dtype=torch.bfloat16)})
    _, exact = reference.value_and_grad(model, SUM)(tree.map(torch.Tensor.double, params), wide(batch))
    _, plain = reference.value_and_grad(model, SUM)(params, batch)
    _, found = value_and_grad(model, SUM, chunk=1)(params, batch)
    assert gradient_error(found, exact) <= max(2 * gradient_error(plain, exact), 2**-8)


def given(params, x, batch):
    return x


def wide(batch):
    return Batch(row=tree.map(torch.Tensor.double, batch.row))


@pytest.mark.parametrize("order", ["layer", "chunk"])
@pytest.mark.parametrize(("stored", "computed"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_the_loss_alone_is_computed_in_the_dtype_that_the_gradient_is(stored, computed, order):
    """A bfloat16 base under float32 adapters is evaluated as it is trained."""
    params, batch = decoder.init(CONFIG, random.key(3), getattr(torch, stored)), batch_of(3, NUM_ROWS)
    params["block1"] = tree.map(torch.Tensor.float, params["block1"])  # as adapters are, beside their base
    how = {"chunk": 2, "order": order, "microbatches": 2}
    dtype = getattr(torch, computed)
    loss, _ = value(MODEL, sft(), compute_dtype=dtype, **how)(params, batch)
    result, _ = value_and_grad(MODEL, sft(), compute_dtype=dtype, **how)(params, batch)
    cast, _ = value(MODEL, sft(), **how)(tree.map(lambda leaf: leaf.to(dtype), params), batch)
    assert loss == result.loss == cast
    assert tree.leaves(params["embedding"])[0].dtype == getattr(torch, stored)


@pytest.mark.parametrize("dtype", [torch.int32, "float32", 16])
def test_a_dtype_that_nothing_computes_in_is_refused(dtype):
    for function in (value, value_and_grad):
        with pytest.raises(OptionsError, match=r"compute_dtype is .*, needs a floating-point dtype or None"):
            function(MODEL, sft(), compute_dtype=dtype)
