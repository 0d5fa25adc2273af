"""Which layers run: all of them, once each, in order, whatever the number of stages."""

import pytest
import torch
from precedence import violations

from rpfunc import Batch, Layer, Model, Plan, value_and_grad
from rpfunc.objectives import Objective
from rpfunc.plan import partition
from rpfunc.schedule import Workload, round_robin, validate
from rpfunc.stream import rowwise
from rpfunc.testing import assert_equal

FORWARD_ONLY = Objective(
    "output",
    prepare=lambda batch: batch,
    total=lambda batch: torch.tensor(1.0, dtype=torch.float64),
    score=lambda output, batch: output.sum(-1),
    loss=lambda sums, batch, total: sums.sum() / total,
)


def digits(num_layers, log=None):
    """Layers f_i(x) = 10 x + i from 0, so that the output spells which layers ran, in order."""

    def layer(index):
        def function(params, x, batch):
            if log is not None:
                log.append(index)
            x = torch.zeros(batch.num_examples, 1, 1, dtype=torch.float64) if index == 0 else x
            return 10 * x + index

        return Layer(f"layer{index}", rowwise(function))

    return Model(tuple(map(layer, range(num_layers))))


def run(model, plan, workers=None, chunk=None):
    batch = Batch(row={"x": torch.zeros(1, 1)})
    return value_and_grad(model, FORWARD_ONLY, plan=plan, workers=workers, chunk=chunk)({}, batch)[0].loss.item()


@pytest.mark.parametrize("num_stages", range(1, 8))
@pytest.mark.parametrize("workers", [None, 4])
def test_seven_layers_spell_123456_for_every_number_of_stages(workers, num_stages):
    """Known fault elsewhere: layers dropped where stages do not divide them."""
    cuts = [7 * stage // num_stages for stage in range(num_stages)]
    assert run(digits(7), Plan.cut(7, cuts, cuts) if num_stages > 1 else Plan.single(7), workers) == 123456
    for size in range(1, 8):
        assert run(digits(7), partition([1.0] * 7, num_stages), size if workers else None) == 123456


@pytest.mark.parametrize("workers", [1, 4, 7])
def test_more_workers_than_layers_and_uneven_costs_change_nothing(workers):
    assert run(digits(1), partition([1.0], 4), workers) == 0
    assert run(digits(5), partition([100.0, 1.0, 1.0, 1.0, 1.0], workers), workers) == 1234


def test_thirty_layers_run_once_forward_in_order_and_never_twice_in_a_stage():
    log = []
    run(digits(30, log), partition([1.0] * 30, 4))
    plan = partition([1.0] * 30, 4)
    recomputed = [layer for span in reversed(plan.backward) for layer in range(*span)]
    assert log == list(range(30)) + recomputed
    work = Workload(plan.slots, 3)
    validate(round_robin(work, 4), work)


@pytest.mark.parametrize("plan", ["X0:3", "F0:1 X1:3 B0:1", "F0:2 X2:3 B0:2", "F0:1 F1:2 X2:3 B0:1 B1:2"])
@pytest.mark.parametrize("workers", [None, 1, 2, 3])
def test_a_subtree_read_by_the_first_and_the_last_stage_has_one_gradient(workers, plan):
    """loss = E · E over two uses of one tensor: 2 E for each microbatch; then one step, and both uses read the same."""

    def first(table, x, batch):
        return table[batch.row["tokens"]]

    def last(table, x, batch):
        return x * table[batch.row["tokens"]]

    middle = Layer("middle", rowwise(lambda params, x, batch: x))
    model = Model((Layer("first", rowwise(first), "table"), middle, Layer("last", rowwise(last), "table")))
    table = torch.tensor([[1.0, 2.0, 3.0], [7.0, 7.0, 7.0]], dtype=torch.float64)
    batch = Batch(row={"tokens": torch.zeros(2, 1, dtype=torch.long)})
    function = value_and_grad(model, FORWARD_ONLY, plan=Plan.parse(plan), workers=workers, microbatches=2)
    result, grads = function({"table": table}, batch)
    assert result.loss == 2 * (1 + 4 + 9)
    assert_equal(grads["table"], torch.tensor([[4.0, 8.0, 12.0], [0.0, 0.0, 0.0]], dtype=torch.float64))
    stepped = table - 0.125 * grads["table"]
    _, again = function({"table": stepped}, batch)
    assert_equal(again["table"][0], 4 * stepped[0])


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5])
def test_every_value_exists_before_it_is_read(num_microbatches):
    plan = Plan.parse("F0:2 F2:5 X5:7 B0:1 B1:4 B4:5")
    batch = Batch(row={"x": torch.zeros(5, 1)})
    function = value_and_grad(digits(7), FORWARD_ONLY, plan=plan, workers=3, microbatches=num_microbatches)
    events = function({}, batch)[0].timeline.events
    order = {tuple(event.task): (event.start_s, event.end_s) for event in events}
    assert len(order) == len(plan.slots) * num_microbatches
    assert violations(order, plan) == []
