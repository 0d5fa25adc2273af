"""No plan and no worker changes a bit where kernels are chosen by what they see of layers and tensors.

torch.matmul looks at whether its operands require gradients, many kernels at strides, autocast at what it has cast.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, Cpu, Layer, Link, Model, State, apply, optim, train_steps, tree, value, value_and_grad
from rpfunc.objectives import Objective
from rpfunc.stream import opaque, rowwise
from rpfunc.train import checkpoint

PLANS = ["X0:3", "F0:1 X1:3 B0:1", "F0:2 X2:3 B0:2", "F0:3 B0:2 B2:3", "F0:3 B0:3"]
SQUARES = Objective(
    "squares",
    prepare=lambda batch: batch,
    total=lambda batch: batch.num_examples,
    score=lambda output, batch: output.square().sum(-1),
    loss=lambda sums, batch, total: sums.sum() / total,
)


def mixes(p, x, batch):
    """A matrix on the left: mixes the rows of each example."""
    return p[: x.shape[1], : x.shape[1]] @ x


MIDDLES = {
    "rows mixed": opaque(mixes),
    "transposed twice": rowwise(lambda p, x, batch: (p @ x.mT).mT),
    "transposed and more": rowwise(lambda p, x, batch: (p @ x.mT).mT + 1),
    "mapped": rowwise(lambda p, x, batch: torch.vmap(lambda row: F.linear(row, p, p[0]))(x)),
    "summed": rowwise(lambda p, x, batch: x @ p + p.sum(0)),
}


def model(middle):
    return Model(
        (
            Layer("first", rowwise(lambda p, x, batch: batch.row["x"] @ p), "first"),
            Layer("middle", MIDDLES[middle], "middle"),
            Layer("head", rowwise(lambda p, x, batch: x @ p), "head"),
        )
    )


def draws(seed, num_examples, num_rows, dtype):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype) / 4

    return {name: normal(8, 8) for name in ("first", "middle", "head")}, normal(num_examples, num_rows, 8)


def assert_same(found, wanted):
    assert torch.equal(found[0].loss, wanted[0].loss)
    assert tree.same_structure(found[1], wanted[1])
    for a, b in zip(tree.leaves(found[1]), tree.leaves(wanted[1]), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@given(
    st.sampled_from(sorted(MIDDLES)),
    st.integers(0, 1000),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from([None, ["head"], ["middle", "head"]]),
    st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_every_plan(middle, seed, num_examples, num_rows, chunk, frozen, dtype):
    params, x = draws(seed, num_examples, num_rows, dtype)
    frozen = frozen and {name: name in frozen for name in params}
    batch, how = Batch(row={"x": x}), {"chunk": chunk, "frozen": frozen, "microbatches": 1 + seed % 3}
    wanted = value_and_grad(model(middle), SQUARES, **how)(params, batch)
    for plan in PLANS:
        assert_same(value_and_grad(model(middle), SQUARES, plan=plan, **how)(params, batch), wanted)
    if frozen is None:
        del how["frozen"]
        assert torch.equal(value(model(middle), SQUARES, **how)(params, batch)[0], wanted[0].loss)


STRIDED = {
    "every other": lambda leaf: torch.cat((leaf, leaf), -1)[..., ::2],
    "columns of more": lambda leaf: torch.cat((leaf, leaf), -1)[..., : leaf.shape[-1]],
    "transposed": lambda leaf: leaf.mT.contiguous().mT,
    "expanded": lambda leaf: leaf[:1].expand(leaf.shape),
    "one long": lambda leaf: leaf[:1],
}


@pytest.mark.parametrize("params_are", ["transposed", "every other", "columns of more", "expanded", None])
@pytest.mark.parametrize("batch_is", [*STRIDED, None])
@given(st.integers(0, 1000))
def test_a_worker_with_memory_of_its_own(params_are, batch_is, seed):
    params, x = draws(seed, 3, 5, torch.float32)
    if params_are:
        params = tree.map(STRIDED[params_are], params)
    batch = Batch(row={"x": STRIDED[batch_is](x) if batch_is else x})
    wanted = value_and_grad(model("summed"), SQUARES, chunk=2)(params, batch)
    for plan in PLANS[1:4:2]:
        how = {"plan": plan, "chunk": 2, "workers": [Cpu(link=Link()), Cpu()]}
        assert_same(value_and_grad(model("summed"), SQUARES, **how)(params, batch), wanted)


@pytest.mark.parametrize("params_are", ["transposed", "every other", "columns of more"])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_from_a_checkpoint_and_one_on_other_workers(tmp_path, params_are, donate, asynchronous):
    optimizer = optim.adamw(0.01)
    how = {"model": model("summed"), "objective": SQUARES, "optimizer": optimizer}
    how |= {"donate": donate, "asynchronous": asynchronous}
    batches = [Batch(row={"x": draws(seed, 3, 5, torch.float32)[1]}) for seed in range(6)]

    def begin():
        return State.create(tree.map(STRIDED[params_are], draws(7, 1, 1, torch.float32)[0]), optimizer)

    def end(state, batches, **options):
        *_, (state, _) = train_steps(state, batches, **how, **options)
        return state

    straight = end(begin(), batches)
    path = tmp_path / "half.safetensors"
    checkpoint.save(path, end(begin(), batches[:3]))
    resumed = end(checkpoint.load(path, begin()), batches[3:])
    elsewhere = end(begin(), batches, workers=[Cpu(link=Link())])
    for name, leaf in straight.params.items():
        assert torch.equal(resumed.params[name], leaf)
        assert torch.equal(elsewhere.params[name], leaf)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_autocast_has_cast_is_of_the_parameters_that_are_read(donate, requires_grad):
    """Its cache, which lasts as long as the caller's context, would give later steps the first one's weights."""
    losses, optimizer = set(), optim.sgd(0.01)
    for workers, plan in [(None, PLANS[0]), (None, PLANS[1]), (2, PLANS[1]), (1, PLANS[3])]:
        params, x = draws(3, 4, 3, torch.float32)
        params = tree.map(lambda leaf: leaf.requires_grad_(requires_grad), params)
        how = {"model": model("summed"), "objective": SQUARES, "optimizer": optimizer, "donate": donate}
        with torch.autocast("cpu", torch.bfloat16):
            *_, (_, result) = train_steps(
                State.create(params, optimizer), [Batch(row={"x": x})] * 6, **how, workers=workers, plan=plan
            )
        losses.add(result.loss.item())
    assert len(losses) == 1


def test_parameters_written_to_between_calls_are_read_anew_under_autocast():
    params, x = draws(3, 4, 3, torch.float32)
    params, batch = tree.map(lambda leaf: leaf.requires_grad_(), params), Batch(row={"x": x})
    runs = {
        "value": lambda: value(model("summed"), SQUARES)(params, batch)[0],
        "apply": lambda: apply(model("summed"))(params, batch)[0].sum(),
        "gradient": lambda: value_and_grad(model("summed"), SQUARES, plan=PLANS[1])(params, batch)[0].loss,
    }
    for name, run in runs.items():
        with torch.autocast("cpu", torch.bfloat16):
            run()
            with torch.no_grad():
                params["head"].mul_(2)
            found = run()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(found, run()), name


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_optimizer_works_in_the_callers_context_whatever_thread_it_is_in(asynchronous):
    seen = []

    def update(updates, state, params):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return tree.map(lambda leaf: -0.01 * leaf, updates), state

    optimizer = optim.Transformation(lambda params: (), update)
    params, x = draws(3, 4, 3, torch.float32)
    how = {"model": model("summed"), "objective": SQUARES, "optimizer": optimizer, "asynchronous": asynchronous}
    with torch.autocast("cpu", torch.bfloat16):
        list(train_steps(State.create(params, optimizer), [Batch(row={"x": x})] * 3, **how))
    assert seen == [(True, False)] * 3


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("donate", [False, True])
def test_parameters_that_require_gradients_are_trained_and_lead_nowhere_back(asynchronous, donate):
    optimizer, (params, x) = optim.sgd(0.01), draws(3, 4, 3, torch.float32)
    params = tree.map(lambda leaf: leaf.requires_grad_(), params)
    how = {"model": model("summed"), "objective": SQUARES, "optimizer": optimizer}
    how |= {"asynchronous": asynchronous, "donate": donate}
    *_, (state, _) = train_steps(State.create(params, optimizer), [Batch(row={"x": x})] * 4, **how)
    assert all(leaf.grad_fn is None for leaf in tree.leaves(state.params))
    output, _ = apply(Model((Layer("hands on", opaque(lambda p, x, batch: p[None]), "first"),)))(
        {"first": params["first"].detach()}, Batch(row={"x": x[:1]})
    )
    assert not output.requires_grad
