"""What is left of asynchronous training when a layer, an update or the caller breaks it off."""

import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from stale_steps import BrokenError, batch_of, by_hand, collect, data, squared, start, steps

from rpfunc import optim
from rpfunc.errors import StateError


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
    layer, task = caught.value.__notes__
    assert layer.startswith("rpfunc: in layer ")
    assert task.startswith("rpfunc: in task 0X0 (layers 0:2, microbatch 0) on worker ")
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("workers", [None, 1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_while_a_batch_is_made_leaves_the_last_state_whole(error, at, donate, workers, asynchronous):
    optimizer = optim.sgd(0.125)

    def batches():
        for number in range(6):
            if number == at:
                raise error
            yield batch_of(1.0)

    reached = [start(optimizer)]
    how = {"donate": donate, "workers": workers, "asynchronous": asynchronous}
    with pytest.raises(error):
        collect(reached, steps(reached[0], batches(), optimizer, squared(), **how))
    wanted, _ = by_hand(1.0, [1.0] * 6, asynchronous)
    assert reached[-1].params["a"].item() == wanted[len(reached) - 1]
    assert len(reached) == max(1, at - asynchronous)


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
