"""Parameters in float32, layers in 16 bits: what must not vanish, what must not overflow, and what is skipped."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, Layer, Model, State, optim, train_steps, value_and_grad
from rpfunc.errors import GradientError
from rpfunc.objectives import Objective
from rpfunc.runtime.state import LossScale
from rpfunc.stream import rowwise
from rpfunc.train import checkpoint


def sum_of_outputs(divided=True):
    """The sum of what comes out; over the number of examples, or over nothing at all."""
    return Objective(
        "sum",
        lambda batch: batch,
        lambda batch: torch.tensor(float(batch.num_examples), dtype=torch.float64),
        lambda output, batch: output,
        lambda sums, batch, total: sums.sum() / total if divided else sums.sum(),
    )


def times_x(seen=None):
    def layer(p, x, batch):
        if seen is not None:
            seen.append((p.dtype, p.item()))
        return p * batch.row["x"].to(p.dtype)

    return Model((Layer("only", rowwise(layer), "a"),))


def data(*values):
    return Batch(row={"x": torch.tensor(values, dtype=torch.float32).reshape(-1, 1)})


def run(state, batches, optimizer, model=None, divided=True, **options):
    model = times_x() if model is None else model
    return train_steps(state, batches, model=model, objective=sum_of_outputs(divided), optimizer=optimizer, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("donate", [False, True])
def test_small_steps_add_up_in_the_parameters_that_the_compute_copies_are_cast_from(asynchronous, donate):
    """1 - 100 * 1e-4 is 0.99, which bfloat16 rounds to 0.98828125; 1 - 1e-4 alone it rounds back to 1."""
    optimizer, seen = optim.sgd(1e-4), []
    *_, (state, _) = run(
        State.create({"a": torch.tensor(1.0)}, optimizer), [data(1.0)] * 100, optimizer, times_x(seen),
        compute_dtype=torch.bfloat16, asynchronous=asynchronous, donate=donate, workers=1,
    )  # fmt: skip
    assert state.params["a"].dtype == torch.float32
    assert state.params["a"].item() == pytest.approx(0.99, rel=1e-5)
    assert {dtype for dtype, _ in seen} == {torch.bfloat16}
    assert seen[0][1] == 1.0
    *_, (_, result) = run(state, [data(1.0)], optimizer, compute_dtype=torch.bfloat16)
    assert result.loss.item() == 0.98828125


@pytest.mark.parametrize("where", ["parameters", "compute_dtype"])
def test_small_gradients_add_up_over_microbatches(where):
    """1 and 256 times 0.001, as bfloat16 has it, make 1.25598...; a sum in bfloat16 stays at 1."""
    thousandth = torch.tensor(0.001).bfloat16().item()
    batch = data(1.0, *[0.001] * 256)
    params = {"a": torch.tensor(1.0, dtype=torch.bfloat16 if where == "parameters" else torch.float32)}
    options = {} if where == "parameters" else {"compute_dtype": torch.bfloat16}
    _, grads = value_and_grad(times_x(), sum_of_outputs(False), microbatches=257, workers=2, **options)(params, batch)
    assert grads["a"].dtype == torch.float32
    assert grads["a"].item() == pytest.approx(1 + 256 * thousandth, rel=1e-6)


LARGEST = 65504.0
"""The largest float16 number."""


def scale_after(scale, overflowed):
    factor, clean = scale
    if overflowed:
        return max(factor / 2, 1.0), 0
    return (factor * 2, 0) if clean + 1 == 2000 else (factor, clean + 1)


def by_hand(p, exponents, scales, asynchronous):
    """(p, skipped, scale, the scales to come) after each step of SGD on p x in float16, in Python's own numbers."""
    scales = list(scales or [(2.0**16, 0)] * (1 + asynchronous))
    for exponent in exponents:
        factor, x = scales[0][0], 2.0**exponent
        overflowed = factor > LARGEST or factor * x > LARGEST
        scales = [*scales[1:], scale_after(scales[-1], overflowed)]
        p -= 0.0 if overflowed else 2.0**-10 * x
        yield p, overflowed, factor, tuple(scales)


@given(
    exponents=st.lists(st.integers(-5, 9), max_size=10),
    asynchronous=st.booleans(),
    donate=st.booleans(),
    divided=st.booleans(),
    workers=st.sampled_from([None, 1, 2]),
    given_scales=st.none() | st.tuples(*[st.tuples(st.sampled_from([2.0**k for k in (0, 1, 5, 8, 14)]),
                                                   st.sampled_from([0, 1996, 1998, 1999]))] * 2),
    stop=st.integers(0, 10),
)  # fmt: skip
def test_the_loss_scale_is_the_recurrence(exponents, asynchronous, donate, divided, workers, given_scales, stop):
    """Also when the run ends after `stop` steps, and another goes on from what it left."""
    optimizer = optim.sgd(2.0**-10)
    scales = () if given_scales is None else given_scales[: 1 + asynchronous]
    options = {"compute_dtype": torch.float16, "asynchronous": asynchronous, "donate": donate, "workers": workers,
               "divided": divided}  # fmt: skip
    state = State({"a": torch.tensor(1.0)}, optimizer.init({"a": torch.tensor(1.0)}), scales=tuple(
        LossScale(*scale) for scale in scales
    ))  # fmt: skip
    wanted = by_hand(1.0, exponents, scales, asynchronous)
    for part in (exponents[:stop], exponents[stop:]):
        running = run(state, [data(2.0**exponent) for exponent in part], optimizer, **options)
        for state, result in running:
            values = state.values()
            found = values.params["a"].item(), result.skipped, result.loss_scale, tuple(map(tuple, values.scales))
            assert found == next(wanted)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_overflow_skips_its_step_and_shows_in_the_scale_of_the_first_iteration_not_begun(asynchronous):
    optimizer = optim.sgd(0.25)
    state = State({"a": torch.tensor(0.0)}, optimizer.init({"a": torch.tensor(0.0)}),
                  scales=(LossScale(1024.0),) * (1 + asynchronous))  # fmt: skip
    found = [
        (result.skipped, result.loss_scale)
        for _, result in run(
            state, map(data, [1.0, 256.0, 1.0, 1.0, 1.0]), optimizer, asynchronous=asynchronous, workers=2,
            compute_dtype=torch.float16,
        )
    ]  # fmt: skip
    later = [1024.0, 512.0, 512.0] if asynchronous else [512.0, 512.0, 512.0]
    assert found == list(zip([False, True, False, False, False], [1024.0, 1024.0, *later], strict=True))


def test_what_float16_loses_without_a_scale_it_keeps_with_one():
    """A gradient of 2**-26 is 0 in float16; scaled by 2**10 it is not, and comes back exactly."""
    optimizer, tiny = optim.sgd(1.0), 2.0**-13
    product = Model((
        Layer("first", rowwise(lambda p, x, batch: p * batch.row["x"].to(p.dtype)), "a"),
        Layer("second", rowwise(lambda p, x, batch: x * tiny), ()),
    ))  # fmt: skip
    for scale, wanted in ((1.0, 0.0), (2.0**10, -(2.0**-26))):
        state = State({"a": torch.tensor(0.0)}, optimizer.init({"a": torch.tensor(0.0)}), scales=(LossScale(scale),))
        ((state, result),) = run(state, [data(tiny)], optimizer, product, compute_dtype=torch.float16)
        assert (state.params["a"].item(), result.grad_norm, result.skipped) == (wanted, abs(wanted), False)


def test_an_overflow_that_no_smaller_scale_would_help_is_raised():
    optimizer = optim.sgd(1.0)
    options = {"compute_dtype": torch.float16, "nonfinite": "raise"}
    state = State({"a": torch.tensor(0.0)}, optimizer.init({"a": torch.tensor(0.0)}), scales=(LossScale(2.0),))
    steps = run(state, [data(float("inf"))] * 3, optimizer, **options)
    assert next(steps)[1].skipped
    with pytest.raises(GradientError, match="step 2: loss nan, gradient norm"):
        next(steps)


def test_scales_of_a_synchronous_run_serve_an_asynchronous_one_and_back():
    optimizer = optim.sgd(2.0**-10)
    state = State.create({"a": torch.tensor(1.0)}, optimizer)
    for asynchronous in (False, True, False, True):
        running = run(
            state, [data(1.0)] * 3, optimizer, asynchronous=asynchronous, compute_dtype=torch.float16, workers=1
        )
        for state, result in running:
            assert len(state.values().scales) == 1 + asynchronous
            last = result
    assert (last.loss_scale, last.skipped) == (2.0**15, False)  # 2.0**16 is no float16 number: one overflow


def test_scales_are_saved(tmp_path):
    optimizer = optim.sgd(1.0)
    scales = (LossScale(2.0**12, 17), LossScale(0.5, 0))
    state = State({"a": torch.tensor(0.0)}, optimizer.init({"a": torch.tensor(0.0)}), 3, scales=scales)
    checkpoint.save(tmp_path / "c", state)
    assert checkpoint.load(tmp_path / "c", state).values().scales == scales


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("before", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("after", [torch.bfloat16, torch.float32, None])
def test_a_run_goes_on_in_another_precision_with_parameters_of_their_own(before, after, donate):
    """What a run was to compute with next is cast to what this one computes in; parameters keep dtype and bits."""
    optimizer = optim.sgd(2.0**-9)
    first = State.create({"a": torch.tensor(1.0)}, optimizer)
    *_, (state, _) = run(first, [data(1.0)] * 3, optimizer, compute_dtype=before, asynchronous=True)
    half, stale = state.params["a"].item(), state.values().stale["a"]
    values, seen = state.values(), []
    again = State(
        {"a": torch.tensor(half)}, values.optimizer_state, state.step, stale={"a": stale.clone()}, scales=values.scales
    )
    how = {"compute_dtype": after, "asynchronous": True, "donate": donate, "workers": 1}
    for number, (state, result) in enumerate(run(again, [data(1.0)] * 4, optimizer, times_x(seen), **how), start=1):
        assert state.params["a"].dtype == torch.float32
        assert state.params["a"].item() == half - number * 2.0**-9
        assert not result.skipped
    assert {dtype for dtype, _ in seen} == {after or torch.float32}
    assert seen[0][1] == stale.item()
