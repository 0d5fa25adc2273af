"""A state may be looked at, saved and given up while its update runs: it is always of one step."""

import random as chance
import threading
import time

import pytest
import torch
from stale_steps import data, steps

from rpfunc import Layer, Model, State, optim, tree
from rpfunc.errors import StateError
from rpfunc.stream import rowwise
from rpfunc.train import checkpoint


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


def test_a_donated_state_is_given_up_by_the_time_that_the_next_one_is_there():
    optimizer = counting(0.01)
    state = State.create({"a": torch.zeros(())}, optimizer)
    model = Model((Layer("only", rowwise(lambda p, x, batch: batch.row["x"] + p), "a"),))
    for following, _ in steps(state, [data([1.0], dtype=torch.float32)] * 4, optimizer, model, donate=True, workers=1):
        with pytest.raises(StateError, match=f"was donated to step {state.step + 1}"):
            _ = state.params
        state = following
