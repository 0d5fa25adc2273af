"""Runs that are wrong on purpose: what the tests of schedules check must refuse each of them."""

import time
from dataclasses import replace

import pytest
import torch

from rpfunc import Batch, Layer, Model, Plan, tree, value_and_grad
from rpfunc.objectives import sft
from rpfunc.runtime import execution, iteration, session
from rpfunc.runtime.iteration import Iteration
from rpfunc.runtime.tasks import Work, perform
from rpfunc.stream import opaque
from rpfunc.stream.freeze import freeze
from rpfunc.testing import assert_computes, assert_equal_bits, exact

SCHEDULES = [
    "0F0 0F1 0F2 0F3 0F4 0F5 0I2 0W2 0I3 0W3 0B0 0B1 0B4 0I5 0W5\n"
    "1F2 1F3 1I2 1I3 1W2 1W3 1F0 1F1 1B0 1B1 1F4 1F5 1B4 1I5 1W5",
    "0F0 0F1 0F2 0F3 1F0 1I0 0I0 1W0 0W0 1F1 1B1 0B1 1F2 1F3 1I2 0B2 1W2 1B3 0I3 0W3 "
    "0F4 0F5 1F4 1F5 1I4 0I4 1W4 1B5 0W4 0B5",
]
SAME = {"microbatches": 6, "blocks": 3, "chunk": 2}
GENERATOR = torch.Generator().manual_seed(0)
ROUNDING = tree.map(lambda leaf: torch.randn(leaf.shape, generator=GENERATOR), exact.init())


def run(params, **options):
    result, grads = value_and_grad(exact.model(), exact.linear(), **options)(params, exact.batch(12, 4))
    return {"loss": result.loss, **grads}


@pytest.fixture(scope="module")
def wanted():
    return run(ROUNDING, **SAME)


def check(wanted):
    """Raises unless the schedules are exact and have the bits of a plain run."""
    for schedule in SCHEDULES:
        for recompute in (True, False):
            options = SAME | {"plan": Plan.symmetric(4, [0, 2]), "schedule": schedule, "recompute": recompute}
            options["workers"] = 1 + schedule.count("\n")
            function = value_and_grad(exact.model(), exact.linear(), **options)
            assert_computes(function, exact.model(), exact.linear(), exact.init(), exact.batch(12, 4))
            assert_equal_bits(run(ROUNDING, **options), wanted)


class OneAccumulator(Iteration):
    """Blocks are not kept apart: sums go in the order of the run."""

    def place(self, task):
        place = super().place(task)
        return place and (*place[:2], 0)


class BlocksBackwards(Iteration):
    """Blocks are added from last to first."""

    def place(self, task):
        place = super().place(task)
        return place and (*place[:2], -place[2])


class SumsInEveryTask(Iteration):
    """Tasks that add nothing write back the sums that they have found, too."""

    def place(self, task):
        return super().place(task._replace(kind="B") if task.kind in "FI" else task)

    def store(self, task, outputs):
        super().store(task, outputs)
        if task.kind in "FI":
            time.sleep(0.02)  # as long tasks of another worker take


class NoWeightGradient(Iteration):
    """What W finds is lost."""

    def store_sums(self, place, sums):
        if self._task.kind != "W":
            super().store_sums(place, sums)

    def inputs(self, task):
        self._task = task
        return super().inputs(task)


class WrongCotangent(Iteration):
    """W of a microbatch gets the cotangent of the one before."""

    def inputs(self, task):
        place = task.stage, task.microbatch
        if task.kind == "W":
            self._last, self._held[place] = self._held[place], getattr(self, "_last", self._held[place])
        return super().inputs(task)


class NoLossAtTheTurn(Iteration):
    """The last stage's loss is left out of its backward pass: what the forward pass has scored is all."""

    def loss(self):
        return self._losses[0].double() * len(self._losses)


WRONG = [OneAccumulator, BlocksBackwards, NoWeightGradient, WrongCotangent, NoLossAtTheTurn]


def gradient_in_both_halves(work, task, params, inputs, sums):
    """I keeps the parameters' gradients that it finds; W adds them once more."""
    outputs, sums = perform(work, task._replace(kind="B" if task.kind in "IW" else task.kind), params, inputs, sums)
    return (outputs._replace(cotangent=None) if task.kind == "W" else outputs), sums


def frozen_input_gradient(work, task, params, inputs, sums):
    """I leaves out the parameters' gradients; cheaper, and other kernels."""
    if task.kind == "I":
        model, params = freeze(work.model, params, True)
        work = replace(work, model=model)
    return perform(work, task, params, inputs, sums)


class ForgetsHalves(Work):
    """A half takes the residuals of a whole backward pass."""

    def segments(self, task):
        return super().segments(task._replace(kind="B") if task.kind in "IW" else task)


def test_the_right_run_passes(wanted):
    check(wanted)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_runs_are_refused(wrong, wanted, monkeypatch):
    monkeypatch.setattr(session, "Iteration", wrong)
    with pytest.raises((AssertionError, KeyError, RuntimeError, ValueError)):
        check(wanted)


def test_tasks_that_add_nothing_leave_the_sums_alone(monkeypatch):
    """A stage goes forward on one worker while it already goes backward on another."""
    options = {"plan": "F0:1 F1:4 B0:2 B2:4", "workers": 2, "microbatches": 4}
    wanted = run(ROUNDING, microbatches=4)
    for _ in range(20):
        assert_equal_bits(run(ROUNDING, **options), wanted)
    monkeypatch.setattr(session, "Iteration", SumsInEveryTask)
    found = [run(ROUNDING, **options) for _ in range(20)]
    with pytest.raises(AssertionError):
        assert_equal_bits(found, [wanted] * 20)


@pytest.mark.parametrize(
    ("place", "wrong"), [("execution.perform", gradient_in_both_halves), ("session.Work", ForgetsHalves)]
)
def test_wrong_tasks_are_refused(place, wrong, wanted, monkeypatch):
    monkeypatch.setattr(f"rpfunc.runtime.{place}", wrong)
    with pytest.raises((AssertionError, KeyError, RuntimeError, ValueError)):
        check(wanted)


def test_a_cotangent_that_both_halves_write_into_is_found_out(wanted, monkeypatch):
    monkeypatch.setattr(iteration, "_copy", lambda cotangent: cotangent)
    with pytest.raises(AssertionError):
        check(wanted)


def check_mixing_rows():
    """Raises unless halves have the bits of whole backward passes where a layer multiplies transposed rows."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def mix(weight, x, batch):
        return (x.mT @ weight).mT

    first = Layer("first", opaque(lambda weight, x, batch: batch.row["x"] @ weight), "first")
    model = Model((first, Layer("mix1", opaque(mix), "mix1"), Layer("mix2", opaque(mix), "mix2")))
    params = {"first": draw(5, 5), "mix1": draw(33, 33), "mix2": draw(33, 33)}
    batch = Batch(row={"x": draw(4, 33, 5), "labels": torch.ones(4, 33).long()})
    found, wanted = (
        value_and_grad(model, sft(), plan=Plan.symmetric(3, [0, 1]), schedule=schedule)(params, batch)[1]
        for schedule in ("0F0 1F0 1I0 1W0 0I0 0W0", "0F0 1F0 1B0 0B0")
    )
    assert_equal_bits(found, wanted)


def test_an_input_gradient_with_frozen_weights_has_other_bits(monkeypatch):
    check_mixing_rows()
    monkeypatch.setattr(execution, "perform", frozen_input_gradient)
    with pytest.raises(AssertionError, match="bits differ"):
        check_mixing_rows()
