"""Errors that take no note, callers that a runtime waits for, and processes that have none of its threads."""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch

from rpfunc import Batch, Cpu, Layer, Model, Runtime, State, optim, train_steps, tree, value_and_grad
from rpfunc.errors import OptionsError
from rpfunc.objectives import Objective
from rpfunc.stream import rowwise
from rpfunc.testing import exact

PARAMS, BATCH, MODEL = exact.init(), exact.batch(4, 3), exact.model()


class RaisesError(Exception):
    def add_note(self, note):
        raise RuntimeError("no notes")


class HoldsError(Exception):
    __notes__ = ()


class FixedError(Exception):
    """As a frozen dataclass: Python's own `contextmanager` cannot hand it on, and raises what it says to that."""

    def __setattr__(self, name, value):
        raise AttributeError(f"{name} is fixed")


ODD = {RaisesError: RaisesError, HoldsError: HoldsError, FixedError: (FixedError, AttributeError)}


def look(steps):
    for state, _ in steps:
        state.values()


def failing(error, at):
    """A model whose first layer raises from its call number `at` on, and then works again."""
    calls = []

    def layer(params, x, batch):
        calls.append(1)
        if len(calls) == at:
            raise error
        return MODEL.layers[0].form.full(params, x, batch)

    first = MODEL.layers[0]
    return Model((Layer(first.name, rowwise(layer), first.reads), *MODEL.layers[1:]))


@pytest.mark.parametrize("error", ODD)
@pytest.mark.parametrize("plan", ["X0:4", "F0:2 X2:4 B0:2", "F0:2 F2:4 B2:4 B0:2"])
@pytest.mark.parametrize("workers", [None, 1, 2])
@pytest.mark.parametrize("at", [1, 3])
def test_an_error_that_takes_no_note_is_raised_all_the_same(error, plan, workers, at):
    with Runtime([Cpu()] * (workers or 0)) as runtime:
        function = value_and_grad(failing(error, at), exact.linear(), plan=plan, workers=runtime, microbatches=4)
        with pytest.raises(ODD[error]):
            function(PARAMS, BATCH)
        result, _ = function(PARAMS, BATCH)
    assert result.loss == value_and_grad(MODEL, exact.linear())(PARAMS, BATCH)[0].loss


@pytest.mark.parametrize("error", ODD)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["update", "loss"])
def test_so_it_is_in_training(error, asynchronous, where):
    def fails(*_):
        raise error

    optimizer = optim.Transformation(lambda params: (), fails) if where == "update" else optim.sgd(0.5)
    objective = replace(exact.linear(), loss=fails) if where == "loss" else exact.linear()
    state = State.create(PARAMS, optimizer)
    how = {"model": MODEL, "objective": objective, "optimizer": optimizer, "workers": 2, "asynchronous": asynchronous}
    with pytest.raises(ODD[error]):
        look(train_steps(state, [BATCH] * 3, **how))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_optimizer_that_calls_the_runtime_that_waits_for_it_is_refused(asynchronous, donate, workers):
    with Runtime([Cpu()] * workers) as runtime:
        search = value_and_grad(MODEL, exact.linear(), workers=runtime)

        def update(updates, state, params):
            return search(params, BATCH)[1], state

        optimizer = optim.Transformation(lambda params: (), update)
        how = {"model": MODEL, "objective": exact.linear(), "optimizer": optimizer, "workers": runtime}
        state = State.create(tree.map(torch.clone, PARAMS), optimizer)
        steps = train_steps(state, [BATCH] * 3, **how, asynchronous=asynchronous, donate=donate)
        with pytest.raises(OptionsError, match="one of its own tasks calls it"):
            look(steps)
        assert search(PARAMS, BATCH)[0].loss.isfinite()  # which goes on serving others


def test_an_optimizer_may_call_another_runtime_and_the_callers_own_thread():
    with Runtime([Cpu()]) as runtime, Runtime([Cpu()]) as other:
        for workers in (other, None):
            search = value_and_grad(MODEL, exact.linear(), workers=workers)
            optimizer = optim.Transformation(lambda params: (), lambda u, s, params: (search(params, BATCH)[1], s))  # noqa: B023
            how = {"model": MODEL, "objective": exact.linear(), "optimizer": optimizer, "workers": runtime}
            assert len(list(train_steps(State.create(PARAMS, optimizer), [BATCH] * 2, **how))) == 2


FORKED = """
    import os, warnings
    from rpfunc import Cpu, Runtime, value_and_grad
    from rpfunc.errors import OptionsError
    from rpfunc.testing import exact

    warnings.simplefilter("ignore")  # Python's own, of forks of processes with threads
    with Runtime([Cpu()]) as runtime:
        function = value_and_grad(exact.model(), exact.linear(), workers=runtime)
        child = os.fork()
        if child == 0:
            try:
                function(exact.init(), exact.batch(2, 3))
            except OptionsError as error:
                os._exit(3 if "forked from" in str(error) else 4)
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        function(exact.init(), exact.batch(2, 3))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_none_of_the_threads_and_says_so():
    subprocess.run([sys.executable, "-c", textwrap.dedent(FORKED)], timeout=50, check=True)


def test_what_a_failed_call_has_left_behind_does_not_count_against_the_next():
    """A traceback and its frames hold each other, and tensors, until the collector comes."""
    large = [True]

    def layer(params, x, batch):
        out = torch.tanh(batch.row["x"] @ params)
        if large[0] and batch.first_example >= 4:
            whole = torch.zeros(1000, 1000)  # seen in no plan: only the first microbatches are planned with
            return out + whole.sum()
        return out

    model = Model((Layer("layer", rowwise(layer), "w"),))
    params, batch = {"w": torch.ones(8, 8)}, Batch(row={"x": torch.ones(8, 5, 8)})
    objective = Objective(
        "sum",
        prepare=lambda batch: batch,
        total=lambda batch: 1,
        score=lambda output, batch: output.sum(-1),
        loss=lambda sums, batch, total: sums.sum() / total,
    )
    with Runtime([Cpu(memory_bytes=100_000)]) as runtime:
        function = value_and_grad(model, objective, workers=runtime, microbatches=4)
        with pytest.raises(ValueError, match="bytes live at once"):
            function(params, batch)
        large[0] = False
        for _ in range(3):
            assert function(params, batch)[0].loss.isfinite()
        assert runtime.meters[0].live_bytes < 100_000
