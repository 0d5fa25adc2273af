"""The optimizer one step behind: skipped steps, edits from outside, any number of microbatches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stale_steps import batch_of, by_hand, collect, data, squared, start, steps

from rpfunc import Layer, Model, State, optim
from rpfunc.errors import GradientError
from rpfunc.stream import rowwise

WORKERS = st.sampled_from([None, 1, 2, 3])
PLANS = {1: "X0:4", 2: "F0:2 X2:4 B0:2", 3: "F0:1 F1:3 X3:4 B0:1 B1:3", 4: "F0:1 F1:2 F2:3 X3:4 B0:1 B1:2 B2:3"}


@given(
    kinds=st.lists(st.sampled_from([1.0, -1.0, 2.0, "empty", math.inf, math.nan]), max_size=9),
    asynchronous=st.booleans(),
    donate=st.booleans(),
    workers=WORKERS,
    momentum=st.sampled_from([0.0, 0.5]),
)
def test_skipped_steps_count_and_change_nothing_else(kinds, asynchronous, donate, workers, momentum):
    optimizer = optim.sgd(0.125, momentum=momentum)
    found = steps(
        start(optimizer), map(batch_of, kinds), optimizer, squared(), asynchronous=asynchronous, donate=donate,
        workers=workers,
    )  # fmt: skip
    wanted, skipped = by_hand(1.0, kinds, asynchronous, momentum)
    reached = [(state.step, state.params["a"].item(), result.skipped) for state, result in found]
    assert reached == list(zip(range(1, len(wanted)), wanted[1:], skipped, strict=True))


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("donate", [False, True])
def test_a_gradient_that_is_not_finite_raises_and_leaves_the_states_before_it(at, donate):
    optimizer = optim.sgd(0.125)
    kinds = [1.0, 2.0, -1.0, 1.0, 2.0]
    kinds[at] = math.inf
    reached = [start(optimizer)]
    with pytest.raises(GradientError, match=f"step {at + 1}: loss inf, gradient norm inf"):
        collect(
            reached,
            steps(reached[0], map(batch_of, kinds), optimizer, squared(), nonfinite="raise", donate=donate, workers=2),
        )
    wanted, _ = by_hand(1.0, kinds, True)
    whole = reached[-1:] if donate else reached
    assert [state.params["a"].item() for state in whole] == wanted[len(reached) - len(whole) : len(reached)]
    assert len(reached) == at + 1


@pytest.mark.parametrize("compute_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_parameters_set_from_outside_are_what_the_next_step_reads_and_updates(asynchronous, compute_dtype):
    optimizer = optim.sgd(0.1)
    plain = Model((Layer("only", rowwise(lambda p, x, batch: p * batch.row["x"].to(p.dtype)), "a"),))
    options = {"asynchronous": asynchronous, "compute_dtype": compute_dtype, "workers": 2}
    ones = [data([1.0], dtype=torch.float32)]
    zero = State.create({"a": torch.tensor(0.0)}, optimizer)
    *_, (state, _) = steps(zero, ones * 3, optimizer, plain, **options)
    edited = State({"a": torch.tensor(5.0)}, state.optimizer_state, state.step)
    ((after, result),) = steps(edited, ones, optimizer, plain, **options)
    assert (result.loss.item(), after.step) == (5.0, 4)
    assert torch.equal(after.params["a"], torch.tensor(5.0) - torch.tensor(0.1))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("donate", [False, True])
def test_edits_between_runs_are_seen_by_forward_and_update(asynchronous, donate):
    """2 p x with x = 1: from 1, two steps; then p is set to 4, and two more."""
    optimizer = optim.sgd(0.125)
    options = {"asynchronous": asynchronous, "donate": donate, "workers": 2}
    *_, (state, _) = steps(start(optimizer), map(batch_of, [1.0, 1.0]), optimizer, squared(), **options)
    edited = State({**state.params, "a": torch.tensor(4.0, dtype=torch.float64)}, state.optimizer_state, state.step)
    seen = [
        (result.loss.item(), state.params["a"].item())
        for state, result in steps(edited, map(batch_of, [1.0, 1.0]), optimizer, squared(), **options)
    ]
    read_second = 4.0 if asynchronous else 3.0
    assert seen == [(16.0, 3.0), (read_second**2, 3.0 - 0.25 * read_second)]


def test_no_argument_is_written_to_without_donation():
    optimizer = optim.sgd(0.125, momentum=0.5)
    first = start(optimizer)
    for _ in range(2):  # the second time the state has been used before
        reached = [
            state.params["a"].item()
            for state, _ in steps(first, map(batch_of, [1.0, 2.0, 1.0]), optimizer, squared(), workers=2)
        ]
        assert reached == by_hand(1.0, [1.0, 2.0, 1.0], True, 0.5)[0][1:]
    assert first.params["a"].item() == 1.0


def scaling_chain():
    """Four layers, each times its own number: the gradients are products, which any autograd can tell."""

    def layer(p, x, batch):
        return (x if isinstance(x, torch.Tensor) else batch.row["x"]) * p

    return Model(tuple(Layer(f"layer{index}", rowwise(layer), f"p{index}") for index in range(4)))


@pytest.mark.parametrize("num_examples", [1, 2, 5, 10])
@pytest.mark.parametrize("microbatches", [1, 3, 4])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_any_number_of_examples_in_any_number_of_microbatches(num_examples, microbatches, num_stages):
    generator = torch.Generator().manual_seed(num_examples)
    xs = torch.randn(3, num_examples, generator=generator, dtype=torch.float64)
    now = [torch.tensor(value, dtype=torch.float64) for value in (0.5, -1.5, 2.0, 0.75)]
    optimizer = optim.sgd(0.01)
    state = State.create({f"p{index}": value for index, value in enumerate(now)}, optimizer)
    found = steps(
        state, (data(x.tolist()) for x in xs), optimizer, scaling_chain(), microbatches=microbatches,
        plan=PLANS[num_stages], workers=2,
    )  # fmt: skip
    stale = now
    for x, (state, result) in zip(xs, found, strict=True):
        at = [value.clone().requires_grad_() for value in stale]
        loss = (x * at[0] * at[1] * at[2] * at[3]).mean()
        grads = torch.autograd.grad(loss, at)
        stale, now = now, [value - 0.01 * grad for value, grad in zip(now, grads, strict=True)]
        torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close([state.params[f"p{index}"] for index in range(4)], now, rtol=1e-12, atol=1e-14)
