"""Training on any workers is the recurrence that its docstring states, bit for bit, synchronous or one step stale."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc import Cpu, State, optim, train_steps, tree, value_and_grad
from rpfunc.runtime import Link
from rpfunc.testing import assert_equal_bits, exact

MODEL, OBJECTIVE = exact.model(("square", "relu")), exact.linear()
PLANS = [None, "X0:4", "F0:2 X2:4 B0:1 B1:2", "F0:1 F1:4 B0:2 B2:4"]


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return tree.map(lambda leaf: torch.randn(leaf.shape, generator=generator).to(dtype), exact.init(("square", "relu")))


def batches(count, examples=4):
    made = [exact.batch(examples, 3, seed=seed) for seed in range(count)]
    return [_as(batch, torch.float64) for batch in made]


def _as(batch, dtype):
    return batch.map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf)


def optimizers():
    return {
        "adamw": optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.05, weight_decay=0.1)),
        "sgd": optim.sgd(0.01, momentum=0.9),
    }


def cast(params, dtype):
    return tree.map(lambda leaf: leaf.to(dtype), params) if dtype else params


def recurrence(params, state, optimizer, batches, staleness, compute_dtype=None, microbatches=2):
    """The states p[1], p[2] ... by the formula alone, one batch after another in this thread."""
    gradient = value_and_grad(MODEL, OBJECTIVE, microbatches=microbatches)
    history = [params] * (1 + staleness)
    for batch in batches:
        result, grads = gradient(cast(history[0], compute_dtype), batch)
        norm = optim.global_norm(grads)
        if math.isfinite(norm) and result.total.item() != 0:
            params, state = optim.step(optimizer, grads, state, params)
        history = [*history[1:], params]
        yield params, state, result.loss, norm


def workers_strategy():
    links = st.builds(Link, disorder=st.integers(0, 10**6))
    return st.one_of(
        st.none(), st.integers(1, 3), st.lists(st.builds(Cpu, link=st.none() | links), min_size=1, max_size=3)
    )


@settings(max_examples=40)
@given(
    workers=workers_strategy(),
    asynchronous=st.booleans(),
    donate=st.booleans(),
    plan=st.sampled_from(PLANS),
    name=st.sampled_from(["adamw", "sgd"]),
    count=st.integers(0, 5),
    compute_dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
    blocks=st.integers(1, 2),
)
def test_training_is_the_recurrence(workers, asynchronous, donate, plan, name, count, compute_dtype, blocks):
    optimizer, data = optimizers()[name], batches(count)
    if compute_dtype is not None:
        data = [_as(batch, compute_dtype) for batch in data]
    start = parameters()
    wanted = recurrence(
        parameters(), optimizer.init(start), optimizer, data, int(asynchronous), compute_dtype, microbatches=2
    )
    found = train_steps(
        State.create(start, optimizer), data, model=MODEL, objective=OBJECTIVE, optimizer=optimizer,
        asynchronous=asynchronous, donate=donate, plan=plan, workers=workers, microbatches=2,
        compute_dtype=compute_dtype,
    )  # fmt: skip
    number = 0
    for number, ((state, result), (params, optimizer_state, loss, norm)) in enumerate(
        zip(found, wanted, strict=True), start=1
    ):
        assert_equal_bits(state.params, params)
        assert_equal_bits(state.optimizer_state, optimizer_state)
        assert (state.step, result.step, result.grad_norm) == (number, number, norm)
        assert torch.equal(result.loss, loss)
        assert not result.skipped
    assert number == count
