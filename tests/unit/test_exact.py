"""The exact models are exact: every number on the way is a multiple of 1/N below 2^53 / N."""

import pytest
import torch

from rpfunc import reference, tree
from rpfunc.testing import exact

BODIES = [
    ("square", "causal"),
    ("causal", "relu", "square"),
    ("relu", "bidirectional"),
    ("square", "opaque", "linear"),
    ("square", "relu"),
]


@pytest.mark.parametrize("objective", [exact.linear, exact.squared, exact.paired])
@pytest.mark.parametrize("body", BODIES, ids="-".join)
@pytest.mark.parametrize("tied", [True, False])
def test_no_number_passes_the_largest_exact_integer(tied, body, objective):
    batch = exact.batch(4, 6, group_size=2)
    model, params = exact.model(body, tied=tied), exact.init(body, tied=tied)
    assert 1.0 < exact.largest(model, objective(), params, batch) < 2**53


@pytest.mark.parametrize("seed", range(5))
def test_losses_and_gradients_are_integers_over_a_power_of_two(seed):
    batch = exact.batch(3, 5, seed=seed)
    total = float(exact.squared().total(batch))
    assert total.hex().startswith("0x1.0000000000000p")
    loss, grads = reference.value_and_grad(exact.model(), exact.squared())(exact.init(seed=seed), batch)
    for leaf in [loss, *tree.leaves(grads)]:
        assert torch.equal(leaf * total, (leaf * total).round())


def test_gradients_are_not_all_zero():
    grads = [
        reference.value_and_grad(exact.model(), exact.linear())(exact.init(seed=s), exact.batch(3, 5, seed=s))[1]
        for s in range(8)
    ]
    for path, leaves in zip(tree.paths(grads[0]), zip(*map(tree.leaves, grads), strict=True), strict=True):
        assert sum(bool(leaf.any()) for leaf in leaves) >= 4, path
