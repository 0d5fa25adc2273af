"""Golden vectors of optax, made by make_optax_golden.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

from rpfunc import optim, tree

GOLDEN = json.loads(Path(__file__).with_name("optax_golden.json").read_text())

WARMUP_COSINE = optim.warmup_cosine(0.0, 0.1, 2, 6, 0.01)

SCHEDULES = {
    "linear": optim.linear(0.0, 1.0, 4),
    "cosine_decay": optim.cosine_decay(0.5, 5, alpha=0.1),
    "warmup_cosine": WARMUP_COSINE,
    "join": optim.join([optim.linear(0.0, 1.0, 4), optim.linear(1.0, 0.5, 3)], [4]),
}

OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "sgd_nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optim.adam(0.1, b1=0.8, b2=0.95),
    "adamw_schedule": optim.adamw(WARMUP_COSINE, weight_decay=0.1),
    "adamw_mask": optim.adamw(0.1, weight_decay=0.1, mask=GOLDEN["mask"]),
    "clip_adamw": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, weight_decay=0.1)),
    "clip_second": optim.chain(optim.trace(0.9), optim.clip_by_global_norm(1.0), optim.scale(-0.1)),
    "masked_sgd": optim.masked(optim.sgd(0.1, momentum=0.9), GOLDEN["mask"]),
    "accumulate_schedule": optim.accumulate(optim.adamw(0.1, weight_decay=0.1), lambda count: 2 if count < 1 else 3),
}


def tensors(lists: Any) -> Any:
    return optree.tree_map(
        lambda values: torch.tensor(values, dtype=torch.float64), lists, is_leaf=lambda node: isinstance(node, list)
    )


def test_every_golden_vector_is_compared() -> None:
    assert GOLDEN["schedules"].keys() == SCHEDULES.keys()
    assert GOLDEN["parameters_after_each_step"].keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(name: str) -> None:
    found = [SCHEDULES[name](count) for count in range(10)]
    assert found == pytest.approx(GOLDEN["schedules"][name], rel=1e-6, abs=1e-9)  # optax computes some in float32


@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str, donated: bool) -> None:
    optimizer = OPTIMIZERS[name]
    step = optim.step_donated if donated else optim.step
    params = tensors(GOLDEN["params"])
    state = optimizer.init(params)
    tolerance = 1e-6 if name == "adamw_schedule" else 1e-12
    for gradients, expected in zip(GOLDEN["gradients"], GOLDEN["parameters_after_each_step"][name], strict=True):
        params, state = step(optimizer, tensors(gradients), state, params)
        for found, wanted in zip(tree.leaves(params), tree.leaves(tensors(expected)), strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
