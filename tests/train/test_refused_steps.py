"""What training cannot begin with, or cannot go on from, is told in words; no fault looks like the end of the steps."""

import json
import math
import threading
import time
from dataclasses import replace

import pytest
import torch
from broken_backward import identity
from stale_steps import batch_of, data, squared, start, steps, summed

from rpfunc import Batch, Layer, Model, State, optim, train_steps, tree
from rpfunc.errors import BatchError, OptionsError
from rpfunc.stream import rowwise

OPTIMIZER = optim.sgd(0.125, momentum=0.5)
MODES = pytest.mark.parametrize("asynchronous", [False, True])


class Ends:
    """An iterator of no known class that ends as iterators do."""

    def __init__(self, count):
        self.left = count

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return batch_of(1.0)


class Indexed:
    """What has items and a length, as a data set has, and no iterator."""

    def __getitem__(self, index):
        return [batch_of(1.0), batch_of(2.0)][index]


@MODES
@pytest.mark.parametrize(
    "make", [lambda: Ends(2), Indexed, lambda: (batch_of(1.0),) * 2, lambda: map(batch_of, [1, 2])]
)
def test_whatever_can_be_iterated_over_is_trained_on(make, asynchronous):
    assert len(list(steps(start(OPTIMIZER), make(), OPTIMIZER, squared(), asynchronous=asynchronous))) == 2


def generator():
    yield batch_of(1.0)


async def awaited():
    yield batch_of(1.0)


CALLED = "; a generator function must be called"
NO_BATCHES = [
    (None, "batches is a NoneType, needs an iterable of Batch, as in [batch]"),
    (5, "batches is a int, needs an iterable of Batch, as in [batch]"),
    ("tokens", "batches is a str, needs an iterable of Batch, as in [batch]"),
    ({"tokens": torch.ones(1, 1)}, "batches is a dict, needs an iterable of Batch, as in [batch]"),
    (batch_of(1.0), "batches is one Batch, needs an iterable of them, as in [batch]"),
    (generator, f"batches is a function, needs an iterable of Batch, as in [batch]{CALLED}"),
    (Ends, f"batches is a type, needs an iterable of Batch, as in [batch]{CALLED}"),
    (awaited(), "batches is a async_generator, needs an iterable of Batch, as in [batch]"),
]


@pytest.mark.parametrize(("batches", "message"), NO_BATCHES)
def test_what_no_batch_can_be_asked_of_is_refused_at_once(batches, message):
    with pytest.raises(OptionsError) as caught:
        steps(start(OPTIMIZER), batches, OPTIMIZER, squared())
    assert str(caught.value) == f"options: {message}"


def test_all_arguments_are_told_of_at_once():
    with pytest.raises(OptionsError) as caught:
        train_steps(
            {}, None, model=squared(), objective=summed(), optimizer=optim.sgd, asynchronous=-1, donate="no",
            nonfinite=True,
        )  # fmt: skip
    assert str(caught.value) == (
        "options: 6 problems\n"
        "  - asynchronous is -1, it must be True or False\n"
        "  - donate is 'no', it must be True or False\n"
        "  - nonfinite is True, it must be 'skip' or 'raise'\n"
        "  - state is a dict, needs a State (State.create(params, optimizer))\n"
        "  - optimizer is a function, needs one of rpfunc.optim\n"
        "  - batches is a NoneType, needs an iterable of Batch, as in [batch]"
    )


@MODES
@pytest.mark.parametrize("odd", [None, 5, "row", {"row": 1}, [batch_of(1.0)], torch.ones(1, 1), Batch, ()])
@pytest.mark.parametrize("after", [0, 2])
def test_an_iterator_that_yields_something_odd_ends_after_the_steps_before(odd, after, asynchronous):
    before = threading.active_count()
    done = []
    running = steps(
        start(OPTIMIZER), [batch_of(1.0)] * after + [odd], OPTIMIZER, squared(), asynchronous=asynchronous
    )  # fmt: skip
    with pytest.raises(BatchError) as caught:
        done.extend(result.step for _, result in running)
    assert (
        str(caught.value) == f"batch: is a {type(odd).__name__}, needs a Batch, as in Batch(row={{'tokens': tokens}})"
    )
    assert done == [1, 2][:after]
    assert threading.active_count() == before


def stop(*_, **__):
    raise StopIteration("early")


class StopsAtOnce:
    """Batches that cannot even be begun with."""

    __iter__ = stop


def stopping_generator():
    yield batch_of(1.0)
    stop()


def of_layer(function):
    return Model((Layer("first", rowwise(function), "a"), squared().layers[1]))


def of_optimizer(leaf):
    return optim.from_leafwise(optim.Leafwise(leaf, init_leaf=lambda path, param: torch.zeros_like(param)))


def of_updates(update):
    return optim.Transformation(lambda params: (), update)


TASK = r"in task 0X0 \(layers 0:2, microbatch 0\) on worker 0"
STEP = r"in the optimizer's step 1 of this run"
MADE = "where batches are made or prepared"
STOPS = {
    "a layer": ({"model": of_layer(stop)}, TASK),
    "a layer's gradient": ({"model": of_layer(lambda p, x, batch: identity(batch.row["x"] * p, stop))}, TASK),
    "a score": ({"objective": replace(summed(), score=stop)}, TASK),
    "a loss": ({"objective": replace(summed(), loss=stop)}, TASK),
    "a preparation": ({"objective": replace(summed(), prepare=stop)}, MADE),
    "a total": ({"objective": replace(summed(), total=stop)}, MADE),
    "a statistic": ({"objective": replace(summed(), statistic=stop)}, MADE),
    "a layer while a statistic is found": (
        {"model": of_layer(stop), "objective": replace(summed(), statistic=lambda sums, batch: sums.sum())},
        ".*",
    ),
    "an optimizer of leaves": ({"optimizer": of_optimizer(stop)}, STEP),
    "an optimizer of trees": ({"optimizer": of_updates(stop)}, STEP),
    "a schedule": ({"schedule": stop}, "in the function given as schedule, for 1 microbatches on 1 worker"),
    "a mask": ({"frozen": stop}, "in the function given as frozen"),
    "a generator of batches": ({"batches": stopping_generator}, MADE),
    "what makes an iterator": ({"batches": StopsAtOnce}, MADE),
}


@MODES
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", STOPS)
def test_a_stop_iteration_inside_is_no_end_of_the_steps(name, donate, asynchronous):
    given, where = STOPS[name]
    given = {"model": squared(), "objective": summed(), "optimizer": OPTIMIZER, "plan": "X0:2", **given}
    batches = given.pop("batches", lambda: [batch_of(1.0)])()
    state, before = start(given["optimizer"]), threading.active_count()
    with pytest.raises(OptionsError) as caught:
        list(train_steps(state, batches, **given, donate=donate, asynchronous=asynchronous))
    caught.match(
        rf"^train_steps: StopIteration\('early'\) was raised (.*, )?{where}; it would look like the end of the steps, "
        "so another error is needed there$"
    )
    cause = caught.value.__cause__
    assert isinstance(cause, StopIteration) or isinstance(cause.__cause__, StopIteration)
    assert threading.active_count() == before


@pytest.mark.parametrize("donate", [False, True])
def test_a_state_whose_update_stopped_says_so_when_it_is_looked_at(donate):
    optimizer = of_optimizer(stop)
    running = steps(start(optimizer), [batch_of(1.0)] * 3, optimizer, squared(), donate=donate)
    state, _ = next(running)
    with pytest.raises(OptionsError, match="was raised in the optimizer's step 1 of this run"):
        _ = state.params
    with pytest.raises(OptionsError, match="was raised in the optimizer's step 1 of this run"):
        next(running)


@MODES
@pytest.mark.parametrize("cause", [None, ValueError("cause")])
def test_other_runtime_errors_stay_as_they_are(cause, asynchronous):
    error = RuntimeError("generator raised StopIteration")

    def function(p, x, batch):
        raise error from cause

    with pytest.raises(RuntimeError) as caught:
        list(steps(start(OPTIMIZER), [batch_of(1.0)], OPTIMIZER, of_layer(function), asynchronous=asynchronous))
    assert caught.value is error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step": True}, "step is True, it must be a whole number"),
        ({"step": -1}, "step is -1, it must be at least 0"),
        ({"step": torch.tensor(3)}, "step is tensor(3), it must be a whole number"),
        ({"scales": None}, "scales is None, needs pairs (factor, clean)"),
        ({"scales": 2.0}, "scales is 2.0, needs pairs (factor, clean)"),
        *[
            (
                {"scales": [scale]},
                f"scales[0] is {scale!r}, needs (factor, clean): a power of 2, and a number of steps",
            )
            for scale in [(3.0, 0), (0.0, 0), (math.inf, 0), (math.nan, 0), (2.0, -1), (2.0, True), (2.0,), "2.0"]
        ],
        ({"stale": 5}, "stale is a int, needs parameters such as params, or None"),
        ({"stale": {"a": torch.ones(())}}, "stale b is missing, in params it is ()"),
        ({"stale": {"a": torch.ones(3), "b": torch.ones(())}}, "stale a is (3,), in params it is ()"),
    ],
)  # fmt: skip
def test_a_state_of_parts_that_do_not_fit_is_refused(given, message):
    params = {"a": torch.ones(()), "b": torch.ones(())}
    with pytest.raises(OptionsError) as caught:
        State(params, (), **given)
    assert str(caught.value) == f"state: {message}"


def overflowing():
    """Gradients of 16 bits that are too large at the first loss scale of all."""
    return (
        [data([2.0], dtype=torch.float32)] * 9,
        start(OPTIMIZER, 1.0, torch.float32),
        {"compute_dtype": torch.float16},
    )


def resumed_without(part, batches, first, how, at):
    """The state after all batches, the run ended after `at` of them and its state written out and read again."""
    *_, (reached, _) = steps(first, batches[:at], OPTIMIZER, squared(), **how)
    saved = {**reached.values()._asdict(), "step": reached.step}
    saved["scales"] = json.loads(json.dumps(saved["scales"]))
    saved.pop(part, None)
    *_, (ended, _) = steps(State(**saved), batches[at:], OPTIMIZER, squared(), **how)
    return ended


@MODES
@pytest.mark.parametrize("half", [False, True])
def test_all_that_a_state_holds_makes_the_same_bits_again_and_no_less_does(half, asynchronous):
    batches, first, how = overflowing() if half else ([batch_of(1.0)] * 9, start(OPTIMIZER), {})
    how["asynchronous"] = asynchronous
    *_, (whole, _) = steps(first, batches, OPTIMIZER, squared(), **how)
    found = {
        part: resumed_without(part, batches, first, how, 6 if half else 4) for part in ("nothing", "stale", "scales")
    }
    same = {
        part: all(map(torch.equal, tree.leaves(state.params), tree.leaves(whole.params)))
        for part, state in found.items()
    }
    assert same == {"nothing": True, "stale": not asynchronous, "scales": not half}
    assert found["nothing"].step == whole.step == 9
    assert found["nothing"].values().scales == whole.values().scales


@MODES
def test_what_goes_on_while_the_caller_is_busy(asynchronous):
    """Iterations that are ahead come to their end; no update does after the one of the state that was yielded."""
    seen, updated = set(), []

    def layer(p, x, batch):
        seen.add(batch.row["x"].item())
        return batch.row["x"] * p

    def leaf(path, update, state, param, coefficients):
        if path == "a":
            updated.append(path)
        return -0.125 * update, state

    optimizer = of_optimizer(leaf)
    running = steps(
        start(optimizer), [data([float(n)]) for n in range(9)], optimizer, of_layer(layer), asynchronous=asynchronous,
        workers=2,
    )  # fmt: skip
    for number, (state, _) in zip(range(1, 5), running, strict=False):
        ahead = number + 1 + asynchronous
        while len(seen) < ahead:
            time.sleep(0.001)
        assert state.params["a"].shape == ()
        assert len(updated) == number
        assert seen == {float(n) for n in range(ahead)}
    running.close()
