"""What a GPU worker refuses, and that nothing of a run stays on the GPU."""

import gc

import pytest
import torch

from rpfunc import Batch, Cuda, Layer, Model, Runtime, value_and_grad
from rpfunc.errors import OptionsError
from rpfunc.objectives import Objective
from rpfunc.stream import opaque, rowwise

PARAMS = {"weight": torch.ones(64, 64)}


def first(params, x, batch):
    return batch.row["x"] @ params


def boom(params, x, batch):
    raise ArithmeticError("of the layer's own")


def greedy(params, x, batch):
    return x + torch.zeros(1 << 26).sum()  # 256 MiB, on the device that is the default here


def scored(function):
    model = Model((Layer("first", rowwise(first), "weight"), Layer("second", opaque(function), "weight")))
    objective = Objective(
        "sum",
        prepare=lambda batch: batch,
        total=lambda batch: torch.ones((), dtype=torch.float64),
        score=lambda output, batch: output.sum(dim=-1),
        loss=lambda sums, batch, total: sums.sum() / total,
    )
    return model, objective


def make_batch():
    return Batch(row={"x": torch.ones(4, 8, 64)})


def test_a_layers_error_is_raised_as_it_is_and_the_next_call_works():
    with Runtime([Cuda()]) as runtime:
        with pytest.raises(ArithmeticError, match="of the layer's own") as caught:
            value_and_grad(*scored(boom), workers=runtime, microbatches=2)(PARAMS, make_batch())
        assert "in task" in caught.value.__notes__[-1]
        result, _ = value_and_grad(*scored(lambda params, x, batch: x), workers=runtime)(PARAMS, make_batch())
        assert result.loss.item() == 4 * 8 * 64 * 64


def test_beyond_memory_bytes_a_task_fails_and_within_it_does_not():
    limit = torch.cuda.memory_allocated() + (1 << 27)
    with pytest.raises(torch.OutOfMemoryError, match="memory_bytes allows"):
        value_and_grad(*scored(greedy), workers=[Cuda(memory_bytes=limit)])(PARAMS, make_batch())
    gc.collect()
    limit = torch.cuda.memory_allocated() + (1 << 29)
    value_and_grad(*scored(greedy), workers=[Cuda(memory_bytes=limit)])(PARAMS, make_batch())


def test_more_memory_than_there_is_and_gpus_that_there_are_not_are_refused():
    with pytest.raises(OptionsError, match="memory_bytes is 1000000000000000, and the GPU has"):
        Runtime([Cuda(memory_bytes=10**15)])
    count = torch.cuda.device_count()
    with pytest.raises(OptionsError, match=f"index 0 to {count - 1} would do"):
        Runtime([Cuda(count)])


def test_a_batch_on_the_gpu_is_refused():
    batch = make_batch().map(torch.Tensor.cuda)
    with pytest.raises(OptionsError, match="have to be on the cpu"):
        value_and_grad(*scored(lambda params, x, batch: x), workers=[Cuda()])(PARAMS, batch)


def test_nothing_stays_on_the_gpu():
    function = value_and_grad(*scored(lambda params, x, batch: torch.relu(x)), workers=[Cuda()] * 2, microbatches=4)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        function(PARAMS, make_batch())
    gc.collect()
    # but for cuBLAS's workspaces, one for each stream, of a few MiB
    assert torch.cuda.memory_allocated() - before <= 4 * (1 << 26)
