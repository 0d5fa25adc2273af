"""A layer that raises, anywhere: its own error reaches the caller, its task named; nothing hangs or stays broken."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from broken_backward import identity

from rpfunc import Batch, Cpu, Layer, Model, Plan, Runtime, value_and_grad
from rpfunc.stream import rowwise
from rpfunc.testing import assert_computes, exact

PARAMS, BATCH = exact.init(("square", "relu")), exact.batch(4, 3)
SOUND = exact.model(("square", "relu"))
PLAN = Plan.parse("F0:1 F1:3 X3:4 B0:2 B2:3")
LIMIT_S = 10.0  # the first gradient in a process imports for seconds


class BrokenError(Exception):
    """What no code but this test's raises."""


def fail():
    raise BrokenError("backward")


def broken_model(place, when):
    """SOUND with layer `place` raising: `when` is 'forward', 'backward', or the number of calls that go well first."""
    calls = []

    def function(params, x, batch):
        calls.append(batch.first_example)
        if when == "forward" or (isinstance(when, int) and len(calls) > when):
            raise BrokenError("forward")
        output = sound.form.full(params, x, batch)
        return identity(output, fail) if when == "backward" else output

    sound = SOUND.layers[place]
    layers = list(SOUND.layers)
    layers[place] = Layer(sound.name, rowwise(function), sound.reads)
    return Model(tuple(layers))


def in_layer(place, when):
    """What the error of `broken_model(place, when)` says of its layer."""
    return f"rpfunc: in layer {SOUND.layers[place].name!r}, {'backward' if when == 'backward' else 'forward'} pass"


def run(model, workers, **options):
    options = {"plan": PLAN, "microbatches": 4, "workers": workers} | options
    return value_and_grad(model, exact.linear(), **options)(PARAMS, BATCH)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("when", ["forward", "backward", 3, 6])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_the_layers_own_error_arrives_in_time_and_the_next_call_is_right(place, when, num_workers):
    if when == 6 and place == 3:
        when = 2  # the head runs once a microbatch
    before = threading.active_count()
    with Runtime([Cpu()] * num_workers) as runtime:
        began = time.monotonic()
        with pytest.raises(BrokenError) as caught:
            run(broken_model(place, when), runtime)
        assert time.monotonic() - began < LIMIT_S
        assert any("rpfunc: in task" in note for note in caught.value.__notes__)
        assert_computes(
            value_and_grad(SOUND, exact.linear(), plan=PLAN, workers=runtime, microbatches=4),
            SOUND, exact.linear(), PARAMS, BATCH,
        )  # fmt: skip
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("place", "when", "note"),
    [
        (0, "forward", "rpfunc: in task 0F0 (layers 0:1, microbatch 0) on worker 0"),
        (2, "forward", "rpfunc: in task 1F0 (layers 1:3, microbatch 0) on worker 1"),
        (3, "forward", "rpfunc: in task 2X0 (layers 3:4, microbatch 0) on worker 0"),
        (3, 2, "rpfunc: in task 2X2 (layers 3:4, microbatch 2) on worker 0"),
        (2, "backward", "rpfunc: in task 1B0 (layers 2:3, microbatch 0) on worker 1"),
        (0, "backward", "rpfunc: in task 0B0 (layers 0:2, microbatch 0) on worker 0"),
    ],
)
def test_the_notes_name_layer_task_layers_microbatch_and_worker(place, when, note):
    with pytest.raises(BrokenError) as caught:
        run(broken_model(place, when), 2)
    assert caught.value.__notes__ == [in_layer(place, when), note]


def test_in_the_callers_own_thread_the_error_is_the_same():
    with pytest.raises(BrokenError) as caught:
        run(broken_model(1, "forward"), None)
    assert caught.value.__notes__ == [
        in_layer(1, "forward"),
        "rpfunc: in task 1F0 (layers 1:3, microbatch 0) on worker 0",
    ]


HALVED = {
    "plan": Plan.symmetric(4, [0, 2]),
    "microbatches": 2,
    "schedule": "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1F1 1I0 1I1 1W0 1W1",
}


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    ("place", "when", "note"),
    [
        (3, "forward", "rpfunc: in task 1F0 (layers 2:4, microbatch 0) on worker 1"),
        (3, 2, "rpfunc: in task 1I0 (layers 2:4, microbatch 0) on worker 1"),
        (3, 4, "rpfunc: in task 1W0 (layers 2:4, microbatch 0) on worker 1"),
        (1, "backward", "rpfunc: in task 0I0 (layers 0:2, microbatch 0) on worker 0"),
        (0, 3, "rpfunc: in task 0W0 (layers 0:2, microbatch 0) on worker 0"),
    ],
)
def test_a_failure_in_half_a_backward_pass_names_the_half(place, when, note, workers):
    """Layer 3 runs forward twice in F, twice in I, then in W."""
    with pytest.raises(BrokenError) as caught:
        run(broken_model(place, when), workers, **HALVED)
    assert caught.value.__notes__ == [in_layer(place, when), note]


@pytest.mark.parametrize("when", range(9))
def test_wherever_halves_and_blocks_fail_nothing_hangs(when):
    lines = ["0F0 0F1 0I0 0B2", "1F0 1F3 1I0 1B2 0W0", "0F2 0F3 1F1 1F2 1W0 1B3", "1B1 0B1 0B3"]
    options = HALVED | {"microbatches": 4, "blocks": 2, "schedule": "\n".join(lines)}
    began = time.monotonic()
    with pytest.raises(BrokenError) as caught:
        run(broken_model(1, when), 4, **options)
    assert time.monotonic() - began < LIMIT_S
    assert caught.value.__notes__[0] == in_layer(1, when)
    assert caught.value.__notes__[1].startswith("rpfunc: in task ")
    run(SOUND, 4, **options)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, StopIteration])
def test_any_kind_of_error_keeps_its_type(error):
    def function(params, x, batch):
        raise error

    layers = (*SOUND.layers[:-1], Layer("head", rowwise(function), "embedding"))
    with pytest.raises(error):
        run(Model(layers), 2)


def test_a_failure_does_not_wait_for_the_tasks_that_have_not_begun():
    ran = []

    def slow(params, x, batch):
        ran.append(batch.first_example)
        if batch.first_example == 0:
            raise BrokenError
        return SOUND.layers[0].form.full(params, x, batch)

    model = Model((Layer("embedding", rowwise(slow), "embedding"), *SOUND.layers[1:]))
    with pytest.raises(BrokenError):
        run(model, 2)
    assert ran == [0]


def test_a_failure_in_the_objective_names_its_task():
    def score(output, batch):
        raise BrokenError

    with pytest.raises(BrokenError) as caught:
        value_and_grad(SOUND, replace(exact.linear(), score=score), workers=2)(PARAMS, BATCH)
    assert "X0 (layers" in caught.value.__notes__[0]


def test_a_shape_error_in_a_layer_names_its_task():
    params = PARAMS | {"relu1": {"weight": torch.ones(3, 5, dtype=torch.float64), "bias": PARAMS["relu1"]["bias"]}}
    with pytest.raises(RuntimeError, match="shape") as caught:
        value_and_grad(SOUND, exact.linear(), plan=PLAN, workers=2)(params, Batch(row=BATCH.row, example=BATCH.example))
    assert "rpfunc: in task 1F0 (layers 1:3, microbatch 0) on worker 1" in caught.value.__notes__


def test_an_error_while_a_plan_is_being_chosen_names_its_layer():
    with pytest.raises(BrokenError) as caught:
        value_and_grad(broken_model(2, "forward"), exact.linear(), workers=2)(PARAMS, BATCH)
    assert "rpfunc: in layer 'relu1', while its cost was counted to choose a plan" in caught.value.__notes__
