import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, Layer, Model, Plan, Runtime, State, optim, random, reference, train_steps, tree
from rpfunc.errors import GradientError, StateError
from rpfunc.models import decoder
from rpfunc.models.decoder import DecoderConfig
from rpfunc.objectives import Objective, sft
from rpfunc.runtime import Cpu
from rpfunc.schedule.timeline import HOST
from rpfunc.stream import rowwise

CONFIG = DecoderConfig(vocabulary=11, width=8, layers=2, heads=2, kv_heads=1, head_size=4, mlp_width=12, dropout=0.2)
MODEL = decoder.model(CONFIG)
OPTIMIZER = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(optim.linear(0.0, 1e-2, 3), weight_decay=0.1))


def batch(step, valid=True):
    key = random.fold_in(random.key(5), step)
    tokens = (random.uniform(key, (3, 6)) * 11).long()
    labels = tokens if valid else torch.full_like(tokens, -100)
    return Batch(row={"tokens": tokens, "labels": labels}, constant={"key": key})


def fresh(dtype=torch.float64):
    return State.create(decoder.init(CONFIG, random.key(0), dtype), OPTIMIZER)


def run(batches, state=None, **options):
    options = {"model": MODEL, "objective": sft(), "optimizer": OPTIMIZER, **options}
    return list(train_steps(state or fresh(), batches, **options))


def bits(state):
    return [leaf.clone() for leaf in tree.leaves((dict(state.params), state.optimizer_state))]


def same_bits(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_steps_equal_the_recurrence_written_out():
    state = fresh()
    params, inner = state.params, state.optimizer_state
    gradient = reference.value_and_grad(MODEL, sft())
    for step in range(4):
        _, grads = gradient(params, batch(step))
        params, inner = optim.step(OPTIMIZER, grads, inner, params)
    reached = run(map(batch, range(4)))[-1][0]
    for found, wanted in zip(tree.leaves(reached.params), tree.leaves(params), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@given(
    workers=st.integers(1, 4),
    donate=st.booleans(),
    recompute=st.booleans(),
    plan=st.sampled_from([None, "F0:3 X3:4 B0:1 B1:3", "F0:1 F1:2 X2:4 B0:2", "X0:4"]),
)
def test_how_the_steps_run_changes_no_bit(workers, donate, recompute, plan):
    plain = run(map(batch, range(3)), fresh(torch.float32), microbatches=2)
    losses = [result.loss for _, result in plain]
    other = run(
        map(batch, range(3)),
        fresh(torch.float32),
        microbatches=2,
        workers=workers,
        donate=donate,
        recompute=recompute,
        plan=Plan.parse(plan) if plan else None,
    )
    assert [result.loss for _, result in other] == losses
    assert same_bits(bits(other[-1][0]), bits(plain[-1][0]))


def test_three_steps_and_three_more_equal_six():
    six = run(map(batch, range(6)))
    three = run(map(batch, range(3)))[-1][0]
    more = run(map(batch, range(3, 6)), three)
    assert same_bits(bits(more[-1][0]), bits(six[-1][0]))
    assert [result.step for _, result in more] == [4, 5, 6]


def test_a_step_without_a_valid_label_changes_nothing_but_the_count():
    start = fresh()
    before = bits(start)
    state, result = run([batch(0, valid=False)], start)[-1]
    assert (result.loss.item(), result.total.item(), result.skipped, state.step) == (0.0, 0.0, True, 1)
    assert same_bits(bits(state), before)


def broken_objective():
    plain = sft()
    return Objective(
        "broken", plain.prepare, plain.total, plain.score, lambda sums, batch, total: sums.sum() * math.inf
    )


def test_a_gradient_that_is_not_finite_is_skipped_or_raised():
    start = fresh()
    before = bits(start)
    state, result = run([batch(0)], start, objective=broken_objective())[-1]
    assert result.skipped
    assert same_bits(bits(state), before)
    with pytest.raises(GradientError, match=r"step 1: loss .*, gradient norm nan"):
        run([batch(0)], objective=broken_objective(), nonfinite="raise")


def test_a_donated_state_cannot_be_used_again():
    start = fresh()
    steps = run(map(batch, range(3)), start, donate=True)
    for old in (start, *(state for state, _ in steps[:-1])):
        with pytest.raises(StateError, match="was donated to step"):
            _ = old.params
    assert steps[-1][0].params is not None


def test_without_donation_every_state_stays_as_it_was():
    start = fresh()
    before = bits(start)
    steps = run(map(batch, range(3)), start)
    assert same_bits(bits(start), before)
    assert len({bits(state)[0].sum().item() for state, _ in steps}) == 3


def test_an_update_that_fails_half_way_breaks_a_donated_state_and_no_other():
    def fail(path, update, state, param, coefficients):
        if path.startswith("norm"):
            raise RuntimeError("update failed")
        return -update, state

    bad = optim.from_leafwise(optim.Leafwise(fail))
    params = decoder.init(CONFIG, random.key(0))
    for donate in (False, True):
        start = State.create(tree.map(torch.clone, params), bad)
        with pytest.raises(RuntimeError, match="update failed"):
            run([batch(0)], start, optimizer=bad, donate=donate)
        if donate:
            with pytest.raises(StateError, match="is broken: the update of step 1 had begun to overwrite it"):
                _ = start.params
        else:
            assert same_bits(tree.leaves(dict(start.params)), tree.leaves(params))


def test_a_failing_batch_comes_after_the_result_of_the_step_before():
    def batches():
        yield batch(0)
        yield batch(1)
        raise KeyError("no more")

    steps = train_steps(fresh(), batches(), model=MODEL, objective=sft(), optimizer=OPTIMIZER, workers=2)
    seen = [next(steps)[1].step, next(steps)[1].step]
    with pytest.raises(KeyError, match="no more"):
        next(steps)
    assert seen == [1, 2]


def test_abandoned_steps_leave_no_thread():
    before = threading.active_count()
    steps = train_steps(fresh(), map(batch, range(9)), model=MODEL, objective=sft(), optimizer=OPTIMIZER, workers=3)
    next(steps)
    assert threading.active_count() == before + 4  # and the optimizer's
    steps.close()
    assert threading.active_count() == before


def test_a_runtime_is_shared_and_its_cursor_moves_on():
    with Runtime([Cpu()] * 3) as runtime:
        plan = Plan.parse("F0:2 X2:4 B0:1 B1:2")  # four slots on three workers
        steps = run(map(batch, range(2)), workers=runtime, plan=plan)
        tasks = [[event for event in result.timeline.events if event.worker != HOST] for _, result in steps]
        first_workers = [min(events, key=lambda event: event.start_s).worker for events in tasks]
        assert first_workers == [0, 1]
        assert runtime.cursor == 8 % 3
    assert same_bits(bits(steps[-1][0]), bits(run(map(batch, range(2)))[-1][0]))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("workers", [None, 2])
def test_a_steps_timeline_shows_the_update_of_the_step_before(asynchronous, workers):
    """It begins after all gradients that it needs; whoever reads what it makes begins no earlier than it."""
    found = [each.timeline for _, each in run(map(batch, range(5)), asynchronous=asynchronous, workers=workers)]
    tasks = [[event for event in timeline.events if event.channel == "compute"] for timeline in found]
    updates = [[event for event in timeline.events if event.channel == "update"] for timeline in found]
    assert [len(each) for each in updates] == [0, 1, 1, 1, 1]
    for k, (update,) in enumerate(updates[1:]):  # of step k
        assert update.worker == HOST
        assert update.start_s <= update.end_s
        assert update.start_s >= max(event.end_s for event in tasks[k])
        if k + 1 + asynchronous < len(tasks):
            assert min(event.start_s for event in tasks[k + 1 + asynchronous]) >= update.start_s


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_clipping_uses_the_norm_over_all_stages(cut, asynchronous, compute_dtype):
    """Gradients (3, 0) and (0, 4) at different layers, limit 1: updates -(0.6, 0) and -(0, 0.8), norm 5."""

    def layer(direction):
        def function(p, x, batch):
            above = x if isinstance(x, torch.Tensor) else 0.0
            return above + (p * direction.to(p.dtype)).sum() * batch.row["one"].to(p.dtype)

        return rowwise(function)

    model = Model(
        (
            Layer("first", layer(torch.tensor([3.0, 0.0])), "a"),
            Layer("second", layer(torch.tensor([0.0, 4.0])), "b"),
            Layer("last", rowwise(lambda p, x, batch: x)),
        )
    )
    objective = Objective(
        "sum",
        lambda b: b,
        lambda b: torch.ones((), dtype=torch.float64),
        lambda out, b: out,
        lambda sums, b, t: sums.sum(),
    )
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1.0))
    plan = {1: "X0:3", 2: "F0:2 X2:3 B0:2", 3: "F0:1 F1:2 X2:3 B0:1 B1:2"}[cut]
    state = State.create({"a": torch.zeros(2), "b": torch.zeros(2)}, optimizer)
    steps = train_steps(
        state,
        [Batch(row={"one": torch.ones(1, 1)})] * 3,
        model=model,
        objective=objective,
        optimizer=optimizer,
        asynchronous=asynchronous,
        compute_dtype=compute_dtype,
        plan=Plan.parse(plan),
        workers=cut,
    )
    for number, (state, result) in enumerate(steps, start=1):
        assert result.grad_norm == 5.0
        torch.testing.assert_close(state.params["a"], number * torch.tensor([-0.6, 0.0]))
        torch.testing.assert_close(state.params["b"], number * torch.tensor([0.0, -0.8]))


@pytest.mark.parametrize("plan", ["X0:2", "F0:1 X1:2 B0:1"])
@pytest.mark.parametrize("case", ["plain", "decay", "clip"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_shared_leaf_decays_once_and_enters_the_norm_once(plan, case, asynchronous):
    """loss = Σ over 2 examples of E · E by two layers that read E = (1, 2, 3): gradient 4 E, norm 4 |E|.

    Over three steps: the loss, 2 E · E, tells that both layers have read the same E.
    """

    def last(p, x, batch):
        return (x * p).sum(-1)

    layers = (
        Layer("first", rowwise(lambda p, x, batch: p * batch.row["one"]), "table"),
        Layer("last", rowwise(last), "table"),
    )
    objective = Objective(
        "sum",
        lambda b: b,
        lambda b: torch.ones((), dtype=torch.float64),
        lambda out, b: out,
        lambda sums, b, t: sums.sum(),
    )
    optimizer = {
        "plain": optim.sgd(0.1),
        "decay": optim.sgd(0.1, weight_decay=0.5),
        "clip": optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1)),
    }[case]
    table = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    found = train_steps(
        State.create({"table": table}, optimizer),
        [Batch(row={"one": torch.ones(2, 1, 1, dtype=torch.float64)})] * 3,
        model=Model(layers),
        objective=objective,
        optimizer=optimizer,
        asynchronous=asynchronous,
        plan=plan,
        workers=2,
        microbatches=2,
    )
    before = table
    for state, result in found:
        read = before if asynchronous else table
        norm = 4 * math.sqrt(float(read @ read))
        assert result.loss.item() == pytest.approx(float(2 * read @ read), rel=1e-12)
        assert result.grad_norm == pytest.approx(norm, rel=1e-12)
        change = {"plain": 4 * read, "decay": 4 * read + 0.5 * table, "clip": 4 * read / norm}[case]
        before, table = table, table - 0.1 * change
        torch.testing.assert_close(state.params["table"], table, rtol=1e-12, atol=1e-12)
