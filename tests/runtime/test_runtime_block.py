"""However a runtime's block begins or ends, no thread is left and torch's count of threads is as it was."""

import gc
import sys
import threading
import weakref

import pytest
import torch

from rpfunc import Cpu, Link, Runtime, value_and_grad
from rpfunc.errors import OptionsError
from rpfunc.runtime import workers as module
from rpfunc.testing import exact

WORKERS = [Cpu(threads=3), Cpu(threads=2, link=Link())]


@pytest.fixture(autouse=True)
def _two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def assert_all_is_as_before(before):
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
    found = []
    fresh = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    fresh.start()
    fresh.join()
    assert (torch.get_num_threads(), *found) == (2, 2)
    assert not module._INTRA_OP_THREADS.locked()


def assert_serves(runtime):
    with runtime:
        value_and_grad(exact.model(), exact.linear(), workers=runtime)(exact.init(), exact.batch(2, 3))


def interrupted_at(line, function):
    """Calls the function; interrupts it at the so many-th line of this library's that the calling thread comes to.

    Returns whether there are so many.
    """
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if "/rpfunc/runtime/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_at_any_line_leaves_no_thread_and_a_runtime_that_can_be_entered():
    """One whose caller keeps it, too; but for the first line of its end, all of which no code of its own precedes."""
    before, line, missed = set(threading.enumerate()), 1, []
    while True:
        runtime = Runtime(WORKERS)

        def block(runtime=runtime):
            with runtime:
                pass

        if not interrupted_at(line, block):
            break
        if any("rpfunc-worker" in thread.name and thread.is_alive() for thread in _settled(before)):
            missed.append(line)
        else:
            assert_serves(runtime)
        del runtime, block  # lets the threads end that are still there
        assert_all_is_as_before(before)
        line += 1
    assert line > 20
    assert len(missed) <= 2


def _settled(before):
    """Returns the threads that are there for good, as far as a second tells."""
    threads = set(threading.enumerate()) - before
    for thread in threads:
        thread.join(0.3)
    return threads


def test_threads_end_with_a_runtime_that_nobody_has_left():
    before, runtime = set(threading.enumerate()), Runtime(WORKERS)
    runtime.__enter__()
    assert len(set(threading.enumerate()) - before) == 7
    gone = weakref.ref(runtime)
    del runtime
    gc.collect()
    assert gone() is None
    assert_all_is_as_before(before)


@pytest.mark.parametrize("number", range(1, 9))
def test_a_thread_that_cannot_be_started_is_told_and_ends_the_others(monkeypatch, number):
    before, start, count = set(threading.enumerate()), threading.Thread.start, 0

    def failing(thread):
        nonlocal count
        count += 1
        if count == number:
            raise RuntimeError("can't start new thread")
        start(thread)

    runtime = Runtime(WORKERS)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing)
        with pytest.raises(RuntimeError, match="can't start new thread") as caught:
            runtime.__enter__()
    if number > 1:  # the first is the one that starts the others
        note = f"rpfunc: thread {number - 1} of a runtime's 7; fewer workers need fewer"
        assert caught.value.__notes__ == [note]
    del caught
    assert_all_is_as_before(before)
    with pytest.raises(OptionsError, match="its threads live in a `with` block only"):
        value_and_grad(exact.model(), exact.linear(), workers=runtime)(exact.init(), exact.batch(2, 3))
    assert_serves(runtime)
    assert_all_is_as_before(before)


def test_an_interrupt_while_the_block_waits_for_its_threads_lets_them_end():
    before, begun, may_end = set(threading.enumerate()), threading.Event(), threading.Event()

    def job():
        begun.set()
        may_end.wait(20)

    def joined(thread):
        raise KeyboardInterrupt

    runtime = Runtime(WORKERS)
    with pytest.MonkeyPatch.context() as patch:
        runtime.__enter__()
        runtime.submit({(1, "gradient_download"): job})
        begun.wait(20)
        patch.setattr(module, "join", joined)
        with pytest.raises(KeyboardInterrupt):
            runtime.__exit__(None, None, None)
    may_end.set()
    assert_all_is_as_before(before)
