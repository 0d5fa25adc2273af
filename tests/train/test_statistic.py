"""Objectives that have to know something of the whole batch first: found with the parameters of the gradient."""

from itertools import product

import pytest
import torch

from rpfunc import Batch, State, optim, random, train_steps, tree, value, value_and_grad
from rpfunc.models import decoder
from rpfunc.models.decoder import DecoderConfig
from rpfunc.objectives import kto

CONFIG = DecoderConfig(vocabulary=11, width=8, layers=2, heads=2, kv_heads=1, head_size=4, mlp_width=12, deviation=1.0)
MODEL, PARAMS = decoder.model(CONFIG), decoder.init(CONFIG, random.key(0))
OPTIMIZER = optim.adamw(1e-2)


def batch(step):
    tokens = (random.uniform(random.fold_in(random.key(1), step), (4, 6)) * 11).long()
    flags = {"desirable": torch.tensor([True, False, True, False]), "kl": torch.tensor([False, True, True, False])}
    example = {"reference_logprobs": torch.full((4,), -15.0, dtype=torch.float64), **flags}
    return Batch(row={"tokens": tokens, "labels": tokens}, example=example)


def begins_with_block0(path, leaf):
    return path.startswith("block0")


def trained(workers, **how):
    state = State.create(tree.map(torch.clone, PARAMS), OPTIMIZER, how.get("frozen"))
    steps = train_steps(
        state, map(batch, range(3)), model=MODEL, objective=kto(), optimizer=OPTIMIZER, workers=workers, **how
    )
    results = [(state, result.loss) for state, result in steps]
    return [loss for _, loss in results] + tree.leaves(dict(results[-1][0].params))


@pytest.mark.parametrize(
    ("asynchronous", "compute_dtype", "frozen", "donate"),
    list(product([False, True], [None, torch.bfloat16, torch.float16], [None, begins_with_block0], [False, True])),
)
def test_any_workers_train_alike(asynchronous, compute_dtype, frozen, donate):
    how = {"asynchronous": asynchronous, "compute_dtype": compute_dtype, "frozen": frozen, "microbatches": 2}
    wanted = trained(None, **how)
    for workers in (1, 2):
        assert all(map(torch.equal, trained(workers, **how, donate=donate), wanted))


@pytest.mark.parametrize("frozen", [None, begins_with_block0])
def test_the_statistic_is_found_in_the_compute_dtype(frozen):
    narrow = tree.map(lambda leaf: leaf.bfloat16(), PARAMS)
    wanted = value_and_grad(MODEL, kto(), frozen=frozen)(narrow, batch(0))[0].loss
    assert wanted != value_and_grad(MODEL, kto())(PARAMS, batch(0))[0].loss
    dtype = torch.bfloat16
    assert value_and_grad(MODEL, kto(), frozen=frozen, compute_dtype=dtype)(PARAMS, batch(0))[0].loss == wanted
    assert value(MODEL, kto(), compute_dtype=dtype)(PARAMS, batch(0))[0] == wanted
