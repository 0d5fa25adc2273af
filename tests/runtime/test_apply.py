"""Outputs without gradients: whole, in order, whatever runs where."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, Cpu, Layer, Link, Model, apply
from rpfunc.errors import ModelError, OptionsError, PlanError
from rpfunc.stream import opaque, rowwise
from rpfunc.testing import assert_equal_bits, exact

MODEL, PARAMS = exact.model(("square", "causal")), exact.init(("square", "causal"))


@given(
    plan=st.sampled_from([None, "F0:4", "F0:1 F1:3 F3:4", "F0:1 F1:2 F2:3 F3:4"]),
    workers=st.sampled_from([None, 1, 2, 3, [Cpu(), Cpu(link=Link(disorder=1))]]),
    microbatches=st.integers(1, 7),
    how=st.sampled_from([{}, {"chunk": 2}, {"chunk": 2, "order": "chunk"}]),
)
def test_outputs_are_those_of_the_model(plan, workers, microbatches, how):
    batch = exact.batch(5, 4)
    output, timeline = apply(MODEL, plan=plan, workers=workers, microbatches=microbatches, **how)(PARAMS, batch)
    assert_equal_bits(output, MODEL(PARAMS, batch))
    assert {event.task.kind for event in timeline.events} == {"F"}


def test_microbatches_are_dealt_to_all_workers():
    _, timeline = apply(MODEL, workers=3, microbatches=5)(PARAMS, exact.batch(5, 4))
    assert {event.worker for event in timeline.events} == {0, 1, 2}


def test_what_cannot_work_is_refused():
    with pytest.raises(PlanError, match="has stages that take gradients, and none are asked for"):
        apply(MODEL, plan="F0:2 X2:4 B0:2")
    with pytest.raises(PlanError, match="ends at layer 3"):
        apply(MODEL, plan="F0:3")
    with pytest.raises(OptionsError, match="microbatches is 0"):
        apply(MODEL, microbatches=0)
    total = Model((Layer("total", opaque(lambda params, x, batch: batch.row["x"].sum())),))
    assert apply(total)({}, Batch(row={"x": torch.ones(2, 3)}))[0] == 6
    with pytest.raises(ModelError, match=r"output tensor has no dimension of examples.*microbatches=1 would do"):
        apply(total, microbatches=2)({}, Batch(row={"x": torch.ones(2, 3)}))


def test_an_error_arrives_with_its_task():
    def broken(params, x, batch):
        raise LookupError

    model = Model((Layer("x", rowwise(lambda params, x, batch: batch.row["x"])), Layer("y", rowwise(broken))))
    with pytest.raises(LookupError) as caught:
        apply(model, plan="F0:1 F1:2", workers=2)({}, Batch(row={"x": torch.ones(2, 3)}))
    assert caught.value.__notes__ == [
        "rpfunc: in layer 'y', forward pass",
        "rpfunc: in task 1F0 (layers 1:2, microbatch 0) on worker 1",
    ]
