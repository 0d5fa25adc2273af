"""The optimizer one step behind: edits, snapshots, skipped steps, and what is left when anything fails."""

import math
import random as chance
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, Layer, Model, State, optim, train_steps, tree
from rpfunc.errors import GradientError, StateError
from rpfunc.objectives import Objective
from rpfunc.stream import rowwise
from rpfunc.train import checkpoint

WORKERS = st.sampled_from([None, 1, 2, 3])
PLANS = {1: "X0:4", 2: "F0:2 X2:4 B0:2", 3: "F0:1 F1:3 X3:4 B0:1 B1:3", 4: "F0:1 F1:2 F2:3 X3:4 B0:1 B1:2 B2:3"}


def summed():
    """The loss is the sum of outputs over the number of examples whose `valid` is not 0."""
    return Objective(
        "sum",
        lambda batch: batch,
        lambda batch: (batch.row["valid"] != 0).sum().double(),
        lambda output, batch: output,
        lambda sums, batch, total: (sums / torch.where(total == 0, 1.0, total)).sum() * (total != 0),
    )


def data(values, valid=1.0, dtype=torch.float64):
    x = torch.tensor(values, dtype=dtype).reshape(-1, 1)
    return Batch(row={"x": x, "valid": torch.full_like(x, valid)})


def steps(state, batches, optimizer, model, **options):
    options = {"asynchronous": True, **options}
    return train_steps(state, batches, model=model, objective=summed(), optimizer=optimizer, **options)


def collect(states, running):
    """Appends each state that is yielded, until something raises."""
    for state, _ in running:
        states.append(state)


def squared(broken=lambda batch: False):
    """x · p², so that the gradient, 2 x p, tells which p it was taken at."""

    def layer(p, x, batch):
        if broken(batch):
            raise BrokenError("layer")
        return batch.row["x"] * p * p

    last = Layer("last", rowwise(lambda p, x, batch: x + 0.0 * p), "b")
    return Model((Layer("first", rowwise(layer), "a"), last))


class BrokenError(Exception):
    """What no code but this test's raises."""


def start(optimizer, p=1.0, dtype=torch.float64):
    return State.create({"a": torch.tensor(p, dtype=dtype), "b": torch.tensor(0.0, dtype=dtype)}, optimizer)


def by_hand(p, kinds, asynchronous, momentum=0.0, rate=0.125):
    """p[0], p[1] ... of SGD on the mean of x p², in Python's own numbers, all of them exact; and who was skipped."""
    reached, sum_of_gradients, skipped = [p], 0.0, []
    for number, kind in enumerate(kinds):
        at = reached[max(0, number - asynchronous)]
        skipped.append(kind == "empty" or not math.isfinite(kind))
        if not skipped[-1]:
            sum_of_gradients = momentum * sum_of_gradients + 2 * kind * at
            reached.append(reached[-1] - rate * sum_of_gradients)
        else:
            reached.append(reached[-1])
    return reached, skipped


def batch_of(kind):
    return data([1.0], valid=0.0) if kind == "empty" else data([kind])


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


def counting(delay_s=0.0005):
    """Adds 1 to each leaf, slowly, and counts in a state of its own."""

    def leaf(path, update, count, param, coefficients):
        time.sleep(delay_s)
        return torch.ones_like(update), count + 1

    return optim.from_leafwise(optim.Leafwise(leaf, init_leaf=lambda path, param: torch.zeros_like(param)))


LEAVES = [f"leaf{index:02d}" for index in range(50)]


def many_leaves():
    def layer(p, x, batch):
        return (x if isinstance(x, torch.Tensor) else batch.row["x"]) + p

    return Model(tuple(Layer(name, rowwise(layer), name) for name in LEAVES))


def check_file(path, optimizer):
    like = State.create({name: torch.zeros(()) for name in LEAVES}, optimizer)
    loaded = checkpoint.load(path, like)
    found = tree.leaves((dict(loaded.params), loaded.optimizer_state))
    assert len(found) >= 2 * len(LEAVES)
    assert {leaf.item() for leaf in found} == {loaded.step}
    if loaded.step > 0:
        assert {leaf.item() for leaf in tree.leaves(loaded.values().stale)} == {loaded.step - 1}
    return loaded.step


@pytest.mark.parametrize("donate", [False, True])
def test_a_checkpoint_written_while_an_update_runs_is_of_one_step(tmp_path, donate):
    optimizer, draw, saved = counting(), chance.Random(0), []
    state = State.create({name: torch.zeros(()) for name in LEAVES}, optimizer)
    batches = (data([1.0], dtype=torch.float32) for _ in range(30))
    running = steps(state, batches, optimizer, many_leaves(), donate=donate, workers=2)
    for state, _ in running:
        if draw.random() < 0.4:
            time.sleep(draw.choice([0.0, 0.005, 0.02]))
            checkpoint.save(tmp_path / "c", state)
            assert check_file(tmp_path / "c", optimizer) == state.step
            saved.append(state.step)
    assert len(saved) > 5
    assert {leaf.item() for leaf in tree.leaves(dict(state.params))} == {30.0}


def test_another_thread_may_save_while_training_goes_on(tmp_path):
    optimizer, draw, newest, found = counting(), chance.Random(1), [], []
    newest.append(State.create({name: torch.zeros(()) for name in LEAVES}, optimizer))
    done = threading.Event()

    def save():
        while not done.is_set():
            state = newest[-1]
            checkpoint.save(tmp_path / "c", state)
            found.append((check_file(tmp_path / "c", optimizer), state.step))
            time.sleep(draw.random() * 0.02)

    saving = threading.Thread(target=save)
    saving.start()
    try:
        batches = (data([1.0], dtype=torch.float32) for _ in range(30))
        for state, _ in steps(newest[0], batches, optimizer, many_leaves(), workers=2):
            newest.append(state)
    finally:
        done.set()
        saving.join()
    assert found
    assert all(stored == wanted for stored, wanted in found)
    assert {leaf.item() for leaf in tree.leaves(dict(newest[-1].params))} == {30.0}


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


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("workers", [None, 1, 3])
def test_a_layer_that_raises_leaves_the_states_before_it_whole(at, donate, workers):
    optimizer, before = optim.sgd(0.125), threading.active_count()
    batches = (data([3.0 if number == at else 1.0]) for number in range(6))
    reached = [start(optimizer)]
    with pytest.raises(BrokenError, match="layer") as caught:
        collect(
            reached,
            steps(
                reached[0], batches, optimizer, squared(lambda batch: batch.row["x"].item() == 3.0),
                donate=donate, workers=workers, plan="X0:2",
            ),
        )  # fmt: skip
    assert len(caught.value.__notes__) == 1
    assert caught.value.__notes__[0].startswith("rpfunc: in task 0X0 (layers 0:2, microbatch 0) on worker ")
    assert threading.active_count() == before
    wanted, _ = by_hand(1.0, [1.0] * 6, True)
    assert len(reached) == at + 1
    assert reached[-1].params["a"].item() == wanted[at]
    if not donate:
        assert [state.params["a"].item() for state in reached] == wanted[: at + 1]
    ((again, _),) = steps(reached[-1], [batch_of(1.0)], optimizer, squared(), workers=workers)
    assert again.params["a"].item() == wanted[at + 1]


def failing_at(step, at_leaf):
    """SGD whose update of one leaf raises in a step, counted from 1; "a" is then updated already or not yet."""

    def leaf(path, update, count, param, coefficients):
        if path == at_leaf and count.item() + 1 == step:
            raise BrokenError("update")
        return -0.125 * update, count + 1

    return optim.from_leafwise(optim.Leafwise(leaf, init_leaf=lambda path, param: torch.zeros_like(param)))


@pytest.mark.parametrize("at", [1, 2, 4, 6])
@pytest.mark.parametrize("at_leaf", ["a", "b"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_update_that_raises_leaves_the_state_before_it(at, at_leaf, asynchronous):
    optimizer, before = failing_at(at, at_leaf), threading.active_count()
    reached = [start(optimizer)]
    with pytest.raises(BrokenError, match="update") as caught:
        collect(
            reached,
            steps(reached[0], map(batch_of, [1.0] * 6), optimizer, squared(), workers=2, asynchronous=asynchronous),
        )
    assert caught.value.__notes__ == [f"rpfunc: in the optimizer's step {at} of this run"]
    assert threading.active_count() == before
    wanted, _ = by_hand(1.0, [1.0] * 6, asynchronous)
    assert [state.params["a"].item() for state in reached[:at]] == wanted[:at]
    for state in reached[at:]:  # was yielded before its update had failed
        with pytest.raises(BrokenError, match="update"):
            _ = state.params


@pytest.mark.parametrize("at", [1, 2, 4, 6])
@pytest.mark.parametrize("at_leaf", ["a", "b"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_donated_state_whose_update_raised_says_that_it_is_broken(at, at_leaf, asynchronous):
    optimizer = failing_at(at, at_leaf)
    reached = [start(optimizer)]
    with pytest.raises(BrokenError, match="update"):
        collect(
            reached,
            steps(
                reached[0], map(batch_of, [1.0] * 6), optimizer, squared(), donate=True, workers=2,
                asynchronous=asynchronous,
            ),
        )  # fmt: skip
    with pytest.raises(StateError, match=f"is broken: the update of step {at} had begun to overwrite it; .*last check"):
        _ = reached[at - 1].params
    for state in reached[: at - 1]:
        with pytest.raises(StateError, match="was donated to step"):
            _ = state.params
    for state in reached[at:]:
        with pytest.raises(BrokenError, match="update"):
            _ = state.params


def test_a_donated_state_is_given_up_by_the_time_that_the_next_one_is_there():
    optimizer = counting(0.01)
    state = State.create({"a": torch.zeros(())}, optimizer)
    model = Model((Layer("only", rowwise(lambda p, x, batch: batch.row["x"] + p), "a"),))
    for following, _ in steps(state, [data([1.0], dtype=torch.float32)] * 4, optimizer, model, donate=True, workers=1):
        with pytest.raises(StateError, match=f"was donated to step {state.step + 1}"):
            _ = state.params
        state = following


@pytest.mark.parametrize("looked_at", [1, 2, 4])
@pytest.mark.parametrize("donate", [False, True])
def test_abandoned_steps_are_dropped_and_the_last_state_is_whole(looked_at, donate):
    optimizer, before = optim.sgd(0.125), threading.active_count()
    running = steps(start(optimizer), map(batch_of, [1.0] * 9), optimizer, squared(), donate=donate, workers=3)
    states = [next(running)[0] for _ in range(looked_at)]
    running.close()
    assert threading.active_count() == before
    wanted, _ = by_hand(1.0, [1.0] * 9, True)
    assert states[-1].params["a"].item() == wanted[looked_at]
    *_, (ended, _) = steps(states[-1], map(batch_of, [1.0] * 3), optimizer, squared(), donate=donate, workers=2)
    assert ended.params["a"].item() == wanted[looked_at + 3]  # nothing of what was dropped has been done twice


INTERRUPTED = """
    import signal, threading, time
    import torch
    from rpfunc import Batch, Layer, Model, State, optim, train_steps
    from rpfunc.objectives import Objective
    from rpfunc.stream import rowwise

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it

    def slow(p, x, batch):
        time.sleep(0.1)
        return batch.row["x"] * p

    objective = Objective("sum", lambda b: b, lambda b: torch.ones((), dtype=torch.float64), lambda out, b: out,
                          lambda sums, b, total: sums.sum())
    optimizer = optim.sgd(1.0)
    state = State.create({"a": torch.zeros(())}, optimizer)
    batches = (Batch(row={"x": torch.ones(1, 1)}) for _ in range(1000))
    try:
        for state, _ in train_steps(state, batches, model=Model((Layer("slow", rowwise(slow), "a"),)), workers=2,
                                    objective=objective, optimizer=optimizer, asynchronous=True, plan="X0:1"):
            print("stepped", flush=True)
    except KeyboardInterrupt:
        print("interrupted", state.step + state.params["a"].item(), threading.active_count(), flush=True)
"""


def test_an_interrupt_ends_the_steps_and_leaves_the_last_state_whole():
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "stepped\n"
        assert process.stdout.readline() == "stepped\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    word, balance, threads = output.split("\n")[-2].split()
    assert (word, balance, threads) == ("interrupted", "0.0", "1")  # each step has taken 1 off
    assert len(output.split("\n")) < 20
    assert process.returncode == 0
