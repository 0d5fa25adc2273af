"""What a worker needs while it works on several examples, cut in rows: as much as is said, to the byte."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc import Batch, Cpu, Layer, Model, value_and_grad
from rpfunc.errors import MemoryLimitError
from rpfunc.objectives import Objective
from rpfunc.stream import rowwise


def layers_of(widths):
    def linear(params, x, batch):
        x = batch.row["x"].to(params["w"].dtype) if isinstance(x, tuple) else x
        return torch.tanh(x @ params["w"] + params["b"])

    return Model(tuple(Layer(f"layer{index}", rowwise(linear), f"layer{index}") for index in range(len(widths) - 1)))


MEAN = Objective(
    "mean",
    lambda batch: batch,
    lambda batch: torch.tensor(float(batch.num_examples)),
    lambda output, batch: output.square().sum(-1),
    lambda sums, batch, total: sums.sum() / total,
)


@settings(max_examples=max(6, settings.default.max_examples // 5))  # each is run without data first, which takes long
@given(
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(1, 3),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from([True, "layer", False]),
    st.sampled_from([None, "F0:2 F2:4 B0:2 B2:4", "F0:4 B0:4", "F0:1 X1:4 B0:1"]),
    st.sampled_from([None, torch.bfloat16]),
)
def test_what_is_said_to_do_does_for_several_examples_however_they_are_cut(
    examples, rows, microbatches, chunk, head_chunk, recompute, plan, dtype
):
    """Rows of several examples are copied when they are cut: none may live longer than it is worked on."""
    widths = [8, 6, 8, 7, 5]
    params = {f"layer{i}": {"w": torch.ones(a, b) / 8, "b": torch.ones(b)} for i, (a, b) in enumerate(pairwise(widths))}
    batch = Batch(row={"x": torch.ones(examples, rows, widths[0])})
    how = {"plan": plan, "chunk": chunk, "head_chunk": head_chunk, "recompute": recompute, "compute_dtype": dtype}

    def run_in(memory_bytes):
        workers = [Cpu(memory_bytes=memory_bytes)]
        return value_and_grad(layers_of(widths), MEAN, workers=workers, microbatches=microbatches, **how)(params, batch)

    with pytest.raises(MemoryLimitError) as caught:
        run_in(1)
    need = int(re.search(r"memory_bytes=(\d+) would do", str(caught.value))[1])
    assert run_in(need)[0].peak_bytes[0] <= need
