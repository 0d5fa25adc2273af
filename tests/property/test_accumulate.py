"""Gradients that are added where they are made are the gradients that plain autograd finds, added to what was there."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rpfunc.stream import few_rows
from rpfunc.stream.accumulate import vjp_into
from rpfunc.sums import whole_sums
from rpfunc.testing import assert_equal, assert_equal_bits, gradient_error

# torch compiles its own rules of forward differentiation when first asked
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

WIDTH = 4
FUNCTIONS = {
    "linear": lambda p, x, ids: F.linear(x, p["square"]),
    "linear with bias": lambda p, x, ids: F.linear(x, p["square"], p["bias"]),
    "linear with bias by name": lambda p, x, ids: F.linear(x, p["square"], bias=p["bias"]),
    "linear of a vector": lambda p, x, ids: F.linear(x[0, 0], p["square"]),
    "linear of a constant": lambda p, x, ids: F.linear(torch.ones_like(x.detach()), p["square"]) + x,
    "one weight twice": lambda p, x, ids: F.linear(F.linear(x, p["square"]).relu(), p["square"]),
    "a product and another use": lambda p, x, ids: F.linear(x, p["square"]) + p["square"].square().sum(0),
    "a product and an expanded use": lambda p, x, ids: F.linear(x, p["square"]) + p["square"].sum(),
    "an expanded use alone": lambda p, x, ids: x * p["square"].sum(),
    "a transposed weight": lambda p, x, ids: F.linear(x, p["square"].T),
    "a half of a weight": lambda p, x, ids: F.linear(x, p["square"][:2]),
    "embedding": lambda p, x, ids: F.embedding(ids, p["table"]) * x,
    "embedding with padding": lambda p, x, ids: F.embedding(ids, p["table"], 1) + x,
    "tied": lambda p, x, ids: F.linear(F.embedding(ids, p["table"]) + x, p["table"]),
    "a row's own weight": lambda p, x, ids: F.embedding(ids, p["table"]).mul(x).sum(-1),
    "nothing": lambda p, x, ids: x * 2,
}


# what layers may do beside: transforms of torch.func, inside which a product's gradient is not the weight's
FUNCTIONS |= {
    "linear under vmap": lambda p, x, ids: torch.vmap(lambda row: F.linear(row, p["square"]))(x),
    "linear of many weights under vmap": lambda p, x, ids: torch.vmap(lambda s: F.linear(x, p["square"] * s))(x[0, 0]),
    "embedding under vmap": lambda p, x, ids: torch.vmap(lambda row: F.embedding(row, p["table"]))(ids) * x,
    "a gradient inside": lambda p, x, ids: x - torch.func.grad(lambda y: F.linear(y, p["square"]).square().sum())(x),
    "a gradient by the weight inside": lambda p, x, ids: F.linear(
        x, torch.func.grad(lambda w: F.linear(x, w).square().sum())(p["square"])
    ),
    "a product's own pullback": lambda p, x, ids: torch.func.vjp(lambda y: F.linear(y, p["square"]), x)[1](x)[0],
    "a tangent": lambda p, x, ids: torch.func.jvp(lambda y: F.linear(y, p["square"]).square(), (x,), (x,))[1],
    "a jacobian": lambda p, x, ids: torch.func.jacrev(lambda y: F.linear(y, p["square"]).square())(x[0, 0]) + x.sum(),
    "a jacobian forward": lambda p, x, ids: torch.func.jacfwd(lambda y: F.linear(y, p["square"]).square())(x[0, 0]),
    "linear before and after a transform": lambda p, x, ids: F.linear(
        torch.vmap(lambda row: F.linear(row, p["square"]))(F.linear(x, p["square"])), p["square"]
    ),
}


def integers(shape, seed):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


def make_params(seed):
    return {
        "bias": integers((WIDTH,), seed),
        "square": integers((WIDTH, WIDTH), seed + 1),
        "table": integers((5, WIDTH), seed + 2),
    }


def make_ids(batch, rows):
    return torch.arange(batch * rows).reshape(batch, rows) * 7 % 5


@pytest.mark.parametrize("name", FUNCTIONS)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(0, 99), st.booleans())
def test_sums_are_what_autograd_gives(name, batch, rows, large, seed, first):
    function, params, x, ids = FUNCTIONS[name], make_params(seed), integers((batch, rows, WIDTH), seed + 3), None
    ids = make_ids(batch, rows)
    tracked = {key: leaf.clone().requires_grad_() for key, leaf in params.items()}
    tracked_x = x.clone().requires_grad_()
    wanted_output = function(tracked, tracked_x, ids)
    cotangent = integers(wanted_output.shape, seed + 4)
    *wanted, wanted_dx = torch.autograd.grad(
        wanted_output, [*tracked.values(), tracked_x], cotangent, allow_unused=True, materialize_grads=True
    )
    before = None if first else tuple(integers(leaf.shape, seed + 5) for leaf in params.values())
    if before is not None:
        wanted = [a + b for a, b in zip(before, wanted, strict=True)]
    output, pull = vjp_into(lambda params, x: function(params, x, ids), params, x, large=large)
    given = cotangent.clone()
    sums, (dx,) = pull((given,), before)
    shared = any(leaf.untyped_storage() == given.untyped_storage() for leaf in dx)
    given = given if shared else given.fill_(99.0)  # what the sums keep is their own
    sums = whole_sums(sums, list(params.values()))
    assert_equal(output, wanted_output.detach())
    assert_equal(list(sums), list(wanted))
    assert_equal(dx[0], wanted_dx)
    storages = [leaf.untyped_storage().data_ptr() for leaf in (*sums, *dx)]
    assert len(set(storages)) == len(storages)
    assert all(leaf.is_contiguous() for leaf in sums)


@pytest.mark.parametrize("name", ["linear", "linear with bias", "tied"])
def test_sums_of_16_bit_products_are_32_bit(name):
    params, x = make_params(0), integers((2, 3, WIDTH), 1)

    def sums_of(dtype, calls, large):
        cast, grads = {key: leaf.to(dtype) for key, leaf in params.items()}, None
        for _ in range(calls):
            output, pull = vjp_into(
                lambda params, x: FUNCTIONS[name](params, x, make_ids(2, 3)), cast, x.to(dtype), large=large
            )
            grads, _ = pull((torch.full_like(output, 1 + 1 / 64),), grads)
        return list(whole_sums(grads, list(params.values())))

    found = sums_of(torch.bfloat16, 300, 1)
    assert all(leaf.dtype == torch.float32 for leaf in found)
    # sums in bfloat16 would stand still long before 300 additions
    assert gradient_error(found, sums_of(torch.float64, 300, 1 << 20)) < 0.02


def test_under_autocast_products_take_the_plain_way():
    params, x = {key: leaf.float() for key, leaf in make_params(0).items()}, integers((1, 3, WIDTH), 1).float()
    sums = []
    for large in (1, 1 << 20):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, pull = vjp_into(lambda params, x: F.linear(x, params["square"]), params, x, large=large)
            sums.append(list(pull((torch.ones_like(output),), None)[0]))
        assert output.dtype == torch.bfloat16
    assert_equal_bits(*sums)


@given(st.integers(1, 200), st.sampled_from([1, 3999, 4000, 4001, 9000]), st.booleans())
def test_few_rows_times_a_tall_weight_is_the_same_product(rows, height, with_bias):
    weight, x = integers((height, 3), 0), integers((1, rows, 3), 1)
    bias = integers((height,), 2) if with_bias else None
    output, _ = vjp_into(lambda weight: F.linear(x, weight, bias), weight, large=1)
    assert_equal(output, x @ weight.T + (0 if bias is None else bias))


@pytest.mark.parametrize("transform", ["vmap", "jvp", "jacfwd"])
def test_few_rows_of_a_large_weight_take_the_plain_way_in_transforms(transform):
    weight, x = integers((few_rows.LARGE // 4, 4), 0), integers((3, 4), 1)

    def call(x):
        if transform == "vmap":
            return torch.vmap(lambda row: F.linear(row, weight))(x)
        if transform == "jvp":
            return torch.func.jvp(lambda x: F.linear(x, weight), (x,), (x,))[1]
        return torch.func.jacfwd(lambda row: F.linear(row, weight))(x[0])

    wanted, wanted_pull = torch.func.vjp(call, x)
    with few_rows.FewRowsProducts():
        assert_equal(call(x), wanted)
        found, pull = torch.func.vjp(call, x)
    assert_equal(found, wanted)
    assert_equal(pull(torch.ones_like(found)), wanted_pull(torch.ones_like(wanted)))


class Counting(TorchDispatchMode):
    """Counts the operations that give a tensor of a shape in new memory."""

    def __init__(self, shape, *known):
        super().__init__()
        self.shape, self.known, self.made = shape, [leaf.untyped_storage() for leaf in known], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self.shape:
            self.made += 0 not in result.stride() and result.untyped_storage() not in self.known
        return result


@pytest.mark.parametrize("name", ["linear", "embedding"])
def test_no_gradient_of_a_large_weight_is_made_beside_its_sum(name):
    weight, x, ids = torch.ones(64, 32), torch.ones(1, 3, 32), torch.tensor([[5, 2, 5]])
    function = {"linear": lambda w: F.linear(x, w), "embedding": lambda w: F.embedding(ids, w)}[name]
    for large, made in ((1, 0), (1 << 20, 1)):
        output, pull = vjp_into(function, weight, large=large)
        total = torch.zeros(64, 32)
        with Counting(weight.shape, weight, total) as counting:
            pull((torch.ones_like(output),), (total,))
        assert (counting.made > 0) == (made > 0)
