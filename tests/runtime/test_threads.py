"""Threads live as long as a call or a `with` block, and leave torch's settings as they found them."""

import threading

import pytest
import torch

from rpfunc import Cpu, Plan, Runtime, value_and_grad
from rpfunc.errors import OptionsError
from rpfunc.testing import assert_computes, assert_equal_bits, exact

PARAMS, BATCH, MODEL = exact.init(), exact.batch(4, 3), exact.model()
PLAN = Plan.parse("F0:2 X2:4 B0:1 B1:2")


def run(workers):
    result, grads = value_and_grad(MODEL, exact.linear(), plan=PLAN, workers=workers, microbatches=2)(PARAMS, BATCH)
    return {"loss": result.loss, **grads}


def in_fresh_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(30)
    return found[0]


@pytest.mark.parametrize("workers", [None, 1, 3, [Cpu(threads=2), Cpu()]])
def test_no_thread_remains_after_a_call(workers):
    before = set(threading.enumerate())
    run(workers)
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("num_threads", [1, 2])
def test_intra_op_threads_stay_as_they_were_here_and_in_fresh_threads(num_threads):
    torch.set_num_threads(num_threads)
    try:
        wanted = torch.get_num_threads(), in_fresh_thread(torch.get_num_threads)
        run([Cpu(threads=2), Cpu(threads=1), Cpu(threads=3)])
        assert (torch.get_num_threads(), in_fresh_thread(torch.get_num_threads)) == wanted
    finally:
        torch.set_num_threads(1)


def test_intra_op_threads_stay_as_they_were_after_many_callers_at_once():
    def call():
        with Runtime([Cpu(), Cpu()]):
            pass

    torch.set_num_threads(2)
    try:
        for _ in range(10):
            callers = [threading.Thread(target=call) for _ in range(8)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join(30)
        assert (torch.get_num_threads(), in_fresh_thread(torch.get_num_threads)) == (2, 2)
    finally:
        torch.set_num_threads(1)


def test_each_worker_has_its_own_intra_op_threads():
    seen = {}

    def note():
        seen[threading.current_thread().name] = torch.get_num_threads()

    with Runtime([Cpu(threads=1), Cpu(threads=2), Cpu()]) as runtime:
        runtime.submit({(worker, "compute"): note for worker in range(3)})
    assert seen == {"rpfunc-worker-0": 1, "rpfunc-worker-1": 2, "rpfunc-worker-2": 1}


def test_the_global_random_state_is_neither_read_nor_changed():
    state = torch.get_rng_state()
    run(2)
    assert torch.equal(torch.get_rng_state(), state)


def test_two_threads_may_use_one_runtime_at_once():
    wanted, found = run(None), []
    with Runtime([Cpu(), Cpu(), Cpu()]) as runtime:
        callers = [threading.Thread(target=lambda: found.extend(run(runtime) for _ in range(5))) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(30)
    assert len(found) == 15
    for each in found:
        assert_equal_bits(each, wanted)


def test_a_runtime_serves_models_and_microbatch_counts_of_all_sizes():
    with Runtime([Cpu(), Cpu()]) as runtime:
        for kinds, num_microbatches in ((("square",), 3), ((), 1), (("causal", "relu", "relu"), 4)):
            model = exact.model(kinds)
            function = value_and_grad(model, exact.linear(), workers=runtime, microbatches=num_microbatches)
            assert_computes(function, model, exact.linear(), exact.init(kinds), BATCH)


def test_a_runtime_cannot_be_used_outside_its_block():
    with Runtime([Cpu()]) as runtime:
        pass
    with pytest.raises(OptionsError, match="its threads live in a `with` block only"):
        run(runtime)


def test_a_runtime_cannot_be_entered_twice():
    with Runtime([Cpu()]) as runtime, pytest.raises(OptionsError, match="is entered already"), runtime:
        pass


def test_parameters_that_require_gradients_are_welcome_and_stay_without():
    params = {
        name: {key: leaf.clone().requires_grad_() for key, leaf in part.items()}
        if isinstance(part, dict)
        else part.clone().requires_grad_()
        for name, part in PARAMS.items()
    }
    result, grads = value_and_grad(MODEL, exact.linear(), plan=PLAN, workers=2)(params, BATCH)
    assert not result.loss.requires_grad
    assert not grads["embedding"].requires_grad
    assert params["embedding"].grad is None
