"""Loss and gradients from a GPU are the CPU's: any plan, number of workers, chunk and recompute grain."""

import pytest
import torch

from rpfunc import Batch, Cuda, Runtime, random, reference, tree, value_and_grad
from rpfunc.models import decoder
from rpfunc.objectives import sft
from rpfunc.testing import assert_close, assert_equal_bits, gradient_error, races

CONFIG = decoder.DecoderConfig(
    vocabulary=50, width=32, layers=4, heads=4, kv_heads=2, head_size=8, mlp_width=48, qk_norm=True, bias=True
)
MODEL = decoder.model(CONFIG)
ROWS, EXAMPLES = 24, 5
PLANS = ["X0:6", "F0:2 F2:4 X4:6 B0:1 B1:4", "F0:1 F1:3 F3:6 B0:2 B2:5 B5:6"]


def parameters(dtype=torch.float64):
    return decoder.init(CONFIG, random.key(0), dtype)


def make_batch(dropped=False):
    tokens = (random.uniform(random.key(1), (EXAMPLES, ROWS)) * CONFIG.vocabulary).long()
    labels = tokens.clone()
    labels[0, :7] = -100
    return Batch(row={"tokens": tokens, "labels": labels}, constant={"key": random.key(5)} if dropped else {})


def compute(workers, dtype=torch.float64, **how):
    result, grads = value_and_grad(MODEL, sft(), workers=workers, **how)(parameters(dtype), make_batch())
    return {"loss": result.loss, "total": result.total, "grads": grads}


def wanted():
    loss, grads = reference.value_and_grad(MODEL, sft())(parameters(), make_batch())
    return {"loss": loss, "grads": grads}


def check(found, expected, tolerance):
    assert all(leaf.device.type == "cpu" for leaf in tree.leaves(found))
    assert_close(found["loss"], expected["loss"], tolerance)
    assert_close(found["grads"], expected["grads"], tolerance)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("cut", [{}, {"chunk": 7}, {"chunk": 10, "head_chunk": 4}], ids=str)
@pytest.mark.parametrize("recompute", ["stage", "layer"])
def test_float64_is_the_cpus(plan, count, cut, recompute):
    found = compute([Cuda()] * count, plan=plan, microbatches=3, recompute=recompute, **cut)
    check(found, wanted(), 1e-10)


def test_chunk_major_order_and_blocks():
    found = compute([Cuda()] * 2, plan=PLANS[1], microbatches=4, blocks=2, chunk=5, order="chunk")
    check(found, wanted(), 1e-10)


def test_float32_is_within_the_contract():
    found = compute([Cuda()] * 2, torch.float32, plan=PLANS[1], microbatches=3, chunk=7)
    check(found, wanted(), 1e-5)


def test_bfloat16_is_no_worse_than_twice_plain_torch_on_the_gpu():
    expected, params = wanted()["grads"], tree.map(torch.Tensor.cuda, parameters(torch.bfloat16))
    _, plain = reference.value_and_grad(MODEL, sft())(params, make_batch().map(torch.Tensor.cuda))
    plain = tree.map(torch.Tensor.cpu, plain)
    found = compute([Cuda()] * 2, torch.bfloat16, plan=PLANS[1], microbatches=3)["grads"]
    assert gradient_error(found, expected) <= 2 * gradient_error(plain, expected)


@pytest.mark.parametrize("cut", [{}, {"chunk": 7}], ids=str)
def test_bits_are_the_same_every_time_and_for_every_plan_and_number_of_workers(cut):
    """In float64, whose kernels have a fixed order of summation."""
    first = compute([Cuda()], plan=PLANS[0], microbatches=3, **cut)
    for plan, count in [(PLANS[0], 1), (PLANS[0], 1), (PLANS[1], 1), (PLANS[1], 3), (PLANS[2], 2)]:
        assert_equal_bits(compute([Cuda()] * count, plan=plan, microbatches=3, **cut), first)


def test_dropout_is_drawn_as_on_a_cpu():
    model = decoder.model(decoder.DecoderConfig(**{**vars(CONFIG), "dropout": 0.3}))
    how = {"plan": PLANS[1], "microbatches": 3, "chunk": 7}
    one, one_grads = value_and_grad(model, sft(), **how)(parameters(), make_batch(dropped=True))
    other, other_grads = value_and_grad(model, sft(), workers=[Cuda()] * 2, **how)(
        parameters(), make_batch(dropped=True)
    )
    assert_close(other.loss, one.loss, 1e-10)
    assert_close(other_grads, one_grads, 1e-10)


def test_frozen_parameters_and_a_compute_dtype():
    def frozen(path, leaf):
        return path.startswith(("block0", "block2"))

    how = {"plan": PLANS[2], "microbatches": 2, "frozen": frozen, "compute_dtype": torch.float64}
    params = parameters(torch.float32)
    one = value_and_grad(MODEL, sft(), **how)(params, make_batch())[1]
    other = value_and_grad(MODEL, sft(), workers=[Cuda()], **how)(params, make_batch())[1]
    assert_close(other, one, 1e-7)  # gradients are of the parameters' dtype or of float32: the sums round


def test_pinned_parameters_are_read_in_place():
    params = tree.map(torch.Tensor.pin_memory, parameters())
    before = tree.map(torch.clone, params)
    loss, grads = value_and_grad(MODEL, sft(), plan=PLANS[1], workers=[Cuda()])(params, make_batch())
    check({"loss": loss.loss, "grads": grads}, wanted(), 1e-10)
    assert_equal_bits(params, before)


@pytest.mark.parametrize("how", [{"plan": PLANS[2], "chunk": 7}, {"plan": PLANS[1], "blocks": 2}], ids=str)
def test_a_run_has_no_race(how):
    with Runtime([Cuda()] * 2, record=True) as runtime:
        compute(runtime, microbatches=5, **how)
    assert runtime.recorder.trace
    assert races(runtime.recorder.trace) == []


def test_the_callers_default_device_and_stream_stay_his():
    stream = torch.cuda.current_stream()
    compute([Cuda()], plan=PLANS[0])
    assert torch.cuda.current_stream() == stream
    assert torch.get_default_device() == torch.device("cpu")
    with torch.device("cuda"):  # even if it is a GPU, host values are made on the host
        found = value_and_grad(MODEL, sft(), workers=[Cuda()], plan=PLANS[1])
    params, batch = parameters(), make_batch()
    with torch.device("cuda"):
        result, grads = found(params, batch)
    check({"loss": result.loss, "grads": grads}, wanted(), 1e-10)
