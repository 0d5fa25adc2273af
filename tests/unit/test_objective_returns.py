"""What an objective's functions return is looked at, wherever it runs, and what cannot work is told by name."""

from dataclasses import replace

import pytest
import torch

from rpfunc import Batch, State, optim, plan, reference, train_steps, value, value_and_grad
from rpfunc.errors import BatchError, ModelError
from rpfunc.objectives import sft
from rpfunc.testing import assert_close, exact

PARAMS, BATCH = exact.init(), exact.batch(3, 3)
MODEL = exact.model()
GOOD = sft()

WRONG = {
    "prepare": [lambda batch: None, lambda batch: batch.examples(0, 1)],
    "total": [
        lambda batch: None,
        lambda batch: "3",
        lambda batch: torch.ones(2),
        lambda batch: torch.tensor(True),
        lambda batch: torch.tensor(1j),
    ],
    "score": [
        lambda output, batch: None,
        lambda output, batch: 1.0,
        lambda output, batch: output.sum(),
        lambda output, batch: output[:, 0, 0],
        lambda output, batch: output[:0, :, 0],
        lambda output, batch: output[..., 0].mean(dim=0, keepdim=True),
        lambda output, batch: output.argmax(-1),
        lambda output, batch: output[..., 0] + 1j,
    ],
    "loss": [
        lambda sums, batch, total: None,
        lambda sums, batch, total: 0.0,
        lambda sums, batch, total: sums / total,
        lambda sums, batch, total: sums.sum().reshape(1),
        lambda sums, batch, total: sums.sum().long(),
    ],
    "statistic": [lambda sums, batch: None, lambda sums, batch: 1.0],
}
CASES = [(name, index) for name, functions in WRONG.items() for index in range(len(functions))]


def trained(objective):
    optimizer = optim.sgd(1.0)
    state = State.create(PARAMS, optimizer)
    return list(train_steps(state, [BATCH], model=MODEL, objective=objective, optimizer=optimizer))


RUNS = {
    "gradient": lambda objective: value_and_grad(MODEL, objective)(PARAMS, BATCH),
    "by chunks": lambda objective: value_and_grad(MODEL, objective, chunk=2, workers=2, microbatches=2)(PARAMS, BATCH),
    "by stages": lambda objective: value_and_grad(MODEL, objective, plan="F0:2 F2:4 B2:4 B0:2")(PARAMS, BATCH),
    "value": lambda objective: value(MODEL, objective)(PARAMS, BATCH),
    "steps": trained,
    "memory": lambda objective: plan.memory(MODEL, objective, PARAMS, BATCH),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_wrong_return_is_told_by_name(run, name, index):
    objective = replace(GOOD, **{name: WRONG[name][index]})
    with pytest.raises(ModelError, match=f"objective 'sft': its `{name}` returned .*; it must return "):
        RUNS[run](objective)


@pytest.mark.parametrize(
    "total", [6, 6.0, torch.tensor(6), torch.tensor(6.0), 2**24 + 1, torch.tensor(2**24 + 1)], ids=str
)
def test_a_total_may_be_any_real_number(total):
    objective = replace(GOOD, total=lambda batch: total)
    found, grads = value_and_grad(MODEL, objective)(PARAMS, BATCH)
    assert found.total == int(total)
    loss, wanted = reference.value_and_grad(MODEL, objective)(PARAMS, BATCH)
    whole = value_and_grad(MODEL, replace(GOOD, total=lambda batch: 1))(PARAMS, BATCH)[0].loss
    assert found.loss == loss == whole / int(total)
    assert_close(grads, wanted, 1e-10)


def test_a_batch_is_no_sparse_one():
    with pytest.raises(BatchError, match=r"row\.tokens is torch\.sparse_coo, needs a dense tensor"):
        Batch(row={"tokens": torch.zeros(2, 3).to_sparse()})
