"""A modelled copy that would take a day ends as soon as nobody needs it."""

import ctypes
import threading

import pytest
import torch

from rpfunc import Cpu, Layer, Link, Model, Runtime, State, optim, train_steps, value_and_grad
from rpfunc.runtime import device
from rpfunc.runtime.device import Lane, LinkedCpu
from rpfunc.runtime.progress import Progress, Stopped
from rpfunc.stream import opaque
from rpfunc.testing import exact

PARAMS, BATCH, MODEL = exact.init(), exact.batch(400, 30), exact.model()
DAYS = [
    {"upload": 1e9, "latency_s": 3600.0},
    {"upload": 1.0},
    {"download": 1.0},
    {"upload": 1.0, "piece_bytes": 1},
]


@pytest.fixture(params=DAYS, ids=str)
def link(request):
    return Link(**request.param)


@pytest.fixture
def copying(monkeypatch):
    """An event: a copy has begun to take its time."""
    begun, whole = threading.Event(), device.sleep_until

    def sleep_until(*args):
        begun.set()
        whole(*args)

    monkeypatch.setattr(device, "sleep_until", sleep_until)
    return begun


def within(seconds, function, interrupt=None):
    """Returns what the function raises, by itself or interrupted after an event; fails if it goes on."""
    found = []

    def call():
        try:
            function()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    if interrupt is not None:
        assert interrupt.wait(60)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
    thread.join(seconds)
    assert found, "it goes on"
    return found[0]


def workers_left():
    return [thread for thread in threading.enumerate() if "rpfunc" in thread.name]


def test_an_interrupt_ends_a_call(link, copying):
    function = value_and_grad(MODEL, exact.linear(), workers=[Cpu(link=link)])
    assert isinstance(within(60, lambda: function(PARAMS, BATCH), copying), KeyboardInterrupt)
    assert workers_left() == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_ends_training(link, asynchronous, copying):
    optimizer = optim.sgd(0.1)
    steps = train_steps(
        State.create(PARAMS, optimizer), [BATCH] * 3, model=MODEL, objective=exact.linear(), optimizer=optimizer,
        asynchronous=asynchronous, workers=[Cpu(link=link)] * 2, microbatches=2,
    )  # fmt: skip
    assert isinstance(within(60, lambda: list(steps), copying), KeyboardInterrupt)
    assert workers_left() == []


def test_a_failure_elsewhere_ends_copies_of_the_same_iteration():
    def fails(params, x, batch):
        raise ZeroDivisionError("the layer's own")

    model = Model((Layer("fails", opaque(fails)), *MODEL.layers[1:]))
    # the last stage's parameters take for ever; the first stage, on another worker, fails
    workers = [Cpu(), Cpu(link=Link(upload=1.0))]
    function = value_and_grad(
        model, exact.linear(), workers=workers, plan="F0:1 F1:4 B1:4 B0:1", schedule="0F0 0B0\n1F0 1B0"
    )
    assert isinstance(within(60, lambda: function(PARAMS, BATCH)), ZeroDivisionError)


def test_a_copy_of_another_run_goes_on_and_one_that_waits_for_its_lane_is_ended():
    lane, held, release = Lane(), threading.Event(), threading.Event()

    def hold():
        with lane.turn(False):
            held.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(20)
    progress = Progress()

    def wait():
        with lane.turn(True, lambda: progress.check(0)):
            raise AssertionError("the lane is held")

    def fail():
        progress.fail(RuntimeError("cancelled"), 0)

    timer = threading.Timer(0.2, fail)
    timer.start()
    assert isinstance(within(60, wait), Stopped)
    assert holder.is_alive()
    release.set()
    holder.join()
    for urgent in (True, False):  # the one that gave up is not waited for
        with lane.turn(urgent):
            assert lane._busy


@pytest.mark.parametrize("options", [day for day in DAYS if "upload" in day], ids=str)
@pytest.mark.parametrize("channel", ["activation_upload", "parameter_upload", "gradient_download"])
def test_a_copy_asks_whether_it_is_still_needed(options, channel):
    linked, progress = LinkedCpu(Link(**{**options, "download": options["upload"]}), 0), Progress()
    source = torch.ones(100_000)
    timer = threading.Timer(0.2, lambda: progress.fail(RuntimeError("cancelled"), 3))
    timer.start()
    ended = within(60, lambda: linked.copy(torch.zeros(100_000), source, channel, lambda: progress.check(3)))
    assert isinstance(ended, Stopped)


def test_a_failure_of_a_later_iteration_is_none_of_an_earlier_one():
    progress = Progress()
    progress.fail(RuntimeError("cancelled"), 1)
    progress.check(0)
    for iteration in (1, 2):
        with pytest.raises(Stopped):
            progress.check(iteration)


def test_a_runtime_can_be_used_after_its_slow_copy_was_ended(link, copying):
    done = []

    def call():
        with Runtime([Cpu(link=link)]) as runtime:
            try:
                value_and_grad(MODEL, exact.linear(), workers=runtime)(PARAMS, BATCH)
            except KeyboardInterrupt:
                runtime.submit({(0, channel): lambda: done.append(1) for channel in ("compute", "parameter_upload")})
        raise EOFError

    assert isinstance(within(60, call, copying), EOFError)
    assert done == [1, 1]
