"""Training with a GPU's gradients follows the CPU's, synchronous or one step behind, with the same bits every time."""

import pytest
import torch

from rpfunc import Batch, Cuda, Runtime, State, optim, random, train_steps, tree
from rpfunc.models import decoder
from rpfunc.objectives import sft
from rpfunc.testing import assert_close, assert_equal_bits, races

CONFIG = decoder.DecoderConfig(vocabulary=50, width=32, layers=3, heads=4, kv_heads=2, head_size=8, mlp_width=48)
MODEL = decoder.model(CONFIG)
PLAN = "F0:1 F1:3 X3:5 B0:2 B2:3"
STEPS = 6


def batches():
    for number in range(STEPS):
        tokens = (random.uniform(random.key(number), (4, 16)) * CONFIG.vocabulary).long()
        yield Batch(row={"tokens": tokens, "labels": tokens})


def train(workers, asynchronous, dtype=torch.float64, **how):
    """Returns each step's (parameters, loss)."""
    # plain descent: what Adam divides by is small where gradients are, and would make much of a last bit
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1, momentum=0.9))
    state = State.create(decoder.init(CONFIG, random.key(0), dtype), optimizer)
    steps = train_steps(
        state, batches(), model=MODEL, objective=sft(), optimizer=optimizer, asynchronous=asynchronous, plan=PLAN,
        workers=workers, microbatches=2, **how,
    )  # fmt: skip
    return [(tree.map(torch.clone, state.params), result.loss) for state, result in steps]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("donate", [False, True])
def test_training_is_the_cpus(asynchronous, count, donate):
    found, wanted = train([Cuda()] * count, asynchronous, donate=donate), train(None, asynchronous)
    assert len(found) == len(wanted) == STEPS
    for (params, loss), (wanted_params, wanted_loss) in zip(found, wanted, strict=True):
        assert_close(loss, wanted_loss, 1e-10)
        assert_close(params, wanted_params, 1e-10)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_bits_are_the_same_every_time(asynchronous):
    first = train([Cuda()] * 2, asynchronous)
    for count in (2, 2, 1):
        assert_equal_bits(train([Cuda()] * count, asynchronous), first)


def test_bfloat16_computes_and_float32_is_kept():
    found = train([Cuda()], True, torch.float32, compute_dtype=torch.bfloat16)
    wanted = train(None, True, torch.float32, compute_dtype=torch.bfloat16)
    assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(found[-1][0]))
    assert_close(found[-1][0], wanted[-1][0], 0.05)
    assert abs(found[-1][1] - wanted[-1][1]) < 0.05


@pytest.mark.parametrize("donate", [False, True])
def test_asynchronous_training_has_no_race(donate):
    with Runtime([Cuda()] * 2, record=True) as runtime:
        train(runtime, True, donate=donate)
    assert runtime.recorder.trace
    assert races(runtime.recorder.trace) == []
