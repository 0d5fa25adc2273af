"""What cannot work is refused at once: no hang, no silent guess."""

import threading
import time
import warnings

import pytest
import torch

from rpfunc import Batch, Cpu, Layer, Model, Plan, Runtime, State, optim, train_steps, tree, value_and_grad
from rpfunc.errors import BatchError, ModelError, OptimizerError, OptionsError, ScheduleError, TreeError
from rpfunc.objectives import sft
from rpfunc.schedule import Workload, round_robin
from rpfunc.stream import opaque, rowwise
from rpfunc.testing import exact

PARAMS, BATCH, MODEL = exact.init(), exact.batch(2, 3), exact.model()


def run(batch=BATCH, model=MODEL, objective=None, **options):
    return value_and_grad(model, objective or exact.linear(), **options)(PARAMS, batch)


@pytest.mark.parametrize("workers", [[1, 1], [], (), "2", 2.5, True, [Cpu(), None]])
def test_workers_that_are_none(workers):
    with pytest.raises(OptionsError, match=r"workers: found|is no worker"):
        run(workers=workers)


@pytest.mark.parametrize("threads", [1.5, "1", 2**31, 2**63, -1])
def test_thread_counts_that_no_machine_has(threads):
    with pytest.raises(OptionsError, match="worker: threads is"):
        Cpu(threads)


def test_a_call_after_the_block_has_begun_to_end_is_refused_and_not_lost():
    wait = Layer("wait", opaque(lambda p, x, batch: time.sleep(0.4) or x))
    slow = Model((MODEL.layers[0], wait, *MODEL.layers[1:]))
    outcome = []
    objective = exact.linear()
    runtime = Runtime([Cpu()])

    def late():
        time.sleep(0.2)
        try:
            outcome.append(value_and_grad(slow, objective, workers=runtime)(PARAMS, BATCH))
        except OptionsError as error:
            outcome.append(error)

    runtime.__enter__()
    caller = threading.Thread(target=late)
    first = threading.Thread(target=lambda: value_and_grad(slow, objective, workers=runtime)(PARAMS, BATCH))
    first.start()
    caller.start()
    time.sleep(0.1)
    runtime.__exit__(None, None, None)
    caller.join(timeout=10)
    first.join(timeout=10)
    assert not caller.is_alive()
    assert "live in a `with` block only" in str(outcome[0])


def test_a_layer_that_calls_into_its_own_runtime_is_refused():
    with Runtime([Cpu(), Cpu()]) as runtime:
        inner = value_and_grad(MODEL, exact.linear(), workers=runtime)
        model = Model((Layer("nested", opaque(lambda p, x, batch: inner(PARAMS, BATCH)[0].loss.view(1, 1))),))
        outer = value_and_grad(model, exact.linear(), workers=runtime, plan="X0:1")
        with pytest.raises(OptionsError, match="one of its own tasks calls it"):
            outer({}, BATCH)
        assert run(workers=runtime)[0].loss == run()[0].loss


def test_things_of_the_wrong_kind_are_named():
    with pytest.raises(OptionsError, match=r"objective is a function, needs Objective"):
        run(objective=sft)
    with pytest.raises(BatchError, match="batch: is a dict, needs a Batch"):
        run(batch={"tokens": torch.zeros(1, 2)})
    with pytest.raises(BatchError, match=r"row\.tokens is a list, needs a tensor|row\.tokens\.0 is a"):
        Batch(row={"tokens": [1, 2]})
    with pytest.raises(ModelError, match="layer 'x' has a function as its form, needs one such as rowwise"):
        Model((Layer("x", lambda p, x, batch: x),))
    with pytest.raises(OptionsError, match=r"chunk is 2\.5, it must be at least 1 row"):
        run(chunk=2.5)
    with pytest.raises(OptionsError, match=r"microbatches is '3', it must be a whole number"):
        run(microbatches="3")
    optimizer = optim.sgd(0.1)
    options = {"model": MODEL, "objective": exact.linear(), "optimizer": optimizer}
    with pytest.raises(OptionsError, match="nonfinite is 'rasie'"):
        train_steps(State.create(PARAMS, optimizer), [], **options, nonfinite="rasie")
    with pytest.raises(OptionsError, match="state is a dict, needs a State"):
        train_steps(PARAMS, [], **options)


def test_a_batch_that_is_none_does_not_end_training():
    optimizer = optim.sgd(0.1)
    steps = train_steps(
        State.create(PARAMS, optimizer),
        [BATCH, None, BATCH],
        model=MODEL,
        objective=exact.linear(),
        optimizer=optimizer,
    )
    next(steps)
    with pytest.raises(BatchError, match="batch: is a NoneType"):
        next(steps)


def test_cuts_that_the_batch_does_not_have():
    for start, stop in ((1, 100), (-1, 2), (2, 1)):
        with pytest.raises(BatchError, match="batch: has rows 0 to 3"):
            BATCH.rows(start, stop)
        with pytest.raises(BatchError, match="batch: has examples 0 to 2"):
            BATCH.examples(start, stop)


def test_masks_that_say_too_much_or_no_boolean():
    with pytest.raises(TreeError, match="the tree has nothing at 'nope'"):
        tree.partition({"a": 1}, {"a": True, "nope": False})
    with pytest.raises(TreeError, match="the mask gives 'yes' for a, needs True or False"):
        tree.partition({"a": 1}, lambda path, leaf: "yes")


def test_two_leaves_of_one_path_are_refused():
    with pytest.raises(TreeError, match=r"two leaves have the path 'a\.b'"):
        tree.paths({"a.b": 1, "a": {"b": 2}})


def test_a_plan_may_be_given_as_text():
    assert run(plan="F0:2 X2:4 B0:1 B1:2", workers=2)[0].loss == run()[0].loss


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_optimizer_state_of_something_else_is_refused_before_any_step(asynchronous):
    optimizer = optim.sgd(0.1, momentum=0.9)
    options = {"model": MODEL, "objective": exact.linear(), "optimizer": optimizer, "asynchronous": asynchronous}
    whole, frozen = State.create(PARAMS, optimizer), lambda path, leaf: path == "embedding"
    with pytest.raises(OptimizerError, match="does not fit"):
        next(train_steps(whole, [BATCH], **options, frozen=frozen))
    with pytest.raises(OptimizerError, match="does not fit"):
        next(train_steps(State.create(PARAMS, optimizer, frozen), [BATCH], **options))
    with pytest.raises(OptimizerError, match="optimizer state is a dict"):
        next(train_steps(State(PARAMS, {}), [BATCH], **options))


@pytest.mark.parametrize("workers", [None, 2])
def test_a_context_that_cannot_be_entered_is_what_is_raised(workers):
    wanted = run()[0].loss
    with Runtime([Cpu()] * (workers or 0)) as runtime:
        with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
            warnings.simplefilter("error")
            torch.set_autocast_dtype("cpu", torch.float64)  # of which autocast only warns
            with pytest.raises(UserWarning, match="autocast"):
                run(workers=runtime)
        assert run(workers=runtime)[0].loss == wanted


@pytest.mark.parametrize("outer", [None, 2])
@pytest.mark.parametrize("inner", [None, 2])
def test_gradients_inside_a_layer_that_is_differentiated_are_refused(outer, inner):
    nested = Layer("nested", rowwise(lambda p, x, batch: x * run(workers=inner)[0].loss), "nested")
    model = Model((*MODEL.layers[:-1], nested, MODEL.layers[-1]))
    params = {**PARAMS, "nested": torch.zeros(())}
    with pytest.raises(OptionsError, match=r"gradients are asked for inside Grad of torch\.func, as in a layer"):
        value_and_grad(model, exact.linear(), workers=outer)(params, BATCH)


def test_frozen_is_the_same_for_state_and_steps():
    optimizer = optim.adamw(1e-2)
    state = State.create(PARAMS, optimizer)
    steps = train_steps(
        state, [BATCH], model=MODEL, objective=exact.linear(), optimizer=optimizer, frozen=lambda path, leaf: True
    )
    with pytest.raises(OptimizerError) as caught:
        next(steps)
    assert "State.create and train_steps need the same `frozen`" in str(caught.value)
    assert "tensor(" not in str(caught.value)


def test_a_schedule_that_is_a_value_does_not_fit_a_shorter_batch_but_a_function_does():
    how = {"plan": "F0:2 X2:4 B0:2", "workers": 2, "microbatches": 2}
    value = round_robin(Workload(Plan.parse(how["plan"]).slots, 2), 2)
    run(schedule=value, **how)
    short = exact.batch(1, 3)
    with pytest.raises(
        ScheduleError, match=r"has 2 microbatches, the batch is cut into 1; a function \(work, num_work"
    ):
        run(short, schedule=value, **how)
    run(short, schedule=round_robin, **how)
