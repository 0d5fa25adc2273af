"""Ctrl-C while the caller waits for its workers ends the program promptly, by KeyboardInterrupt."""

import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future

import pytest

from rpfunc.runtime.waiting import acquire, result_of, wait_until

PROGRAM = """
    import signal, threading, time
    import torch
    from rpfunc import Layer, Model, Plan, value_and_grad
    from rpfunc.stream import rowwise
    from rpfunc.testing import exact

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    sound = exact.model(("square",))
    begun = []

    def slow(params, x, batch):
        begun.append(1)
        print("begun", flush=True)
        time.sleep(0.2)
        return sound.layers[1].form.full(params, x, batch)

    model = Model((sound.layers[0], Layer("square0", rowwise(slow), "square0"), sound.layers[2]))
    function = value_and_grad(model, exact.linear(), workers=2, microbatches=200, plan=Plan.parse("F0:2 X2:3 B0:2"))
    try:
        function(exact.init(("square",)), exact.batch(200, 2))
    except KeyboardInterrupt:
        print("interrupted", len(begun), threading.active_count(), flush=True)
"""


def test_an_interrupt_that_came_before_the_wait_is_seen_in_time():
    """Its handler sets a flag and does not wake who has just gone to sleep: nothing may sleep for long."""
    ready, condition = threading.Lock(), threading.Condition()
    ready.acquire()
    threading.Timer(1.2, ready.release).start()
    acquire(ready)  # through more than one moment
    found = []
    threading.Timer(1.2, lambda: found.append(1)).start()  # nobody notifies
    with condition:
        wait_until(condition, lambda: bool(found))
    future = Future()
    threading.Timer(1.2, lambda: future.set_exception(TimeoutError("the work's own"))).start()
    with pytest.raises(TimeoutError, match="the work's own"):
        result_of(future)


def test_an_interrupt_ends_the_wait_and_the_workers():
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    word, begun, threads = output.split("\n")[-2].split()
    assert word == "interrupted"
    assert int(begun) < 20
    assert threads == "1"
    assert process.returncode == 0
