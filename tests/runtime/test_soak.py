"""Many runs of all kinds, some of which fail on purpose: none hangs, none leaks, every result is right."""

import gc
import threading

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpfunc import Cpu, Layer, Link, Model, State, optim, train_steps, tree, value_and_grad
from rpfunc.schedule import Workload
from rpfunc.stream import rowwise
from rpfunc.testing import assert_equal_bits, exact, strategies
from rpfunc.testing.schedules import runnable_schedules, unfused_plans

KINDS = ("square", "causal")
SOUND, OBJECTIVE, OPTIMIZER = exact.model(KINDS), exact.linear(), optim.adamw(0.05)
GENERATOR = torch.Generator().manual_seed(1)
PARAMS = tree.map(lambda leaf: torch.randn(leaf.shape, generator=GENERATOR).double(), exact.init(KINDS))
BATCHES = [exact.batch(4, 3, seed=seed) for seed in range(4)]
FAILING_PERCENT = 5


class InjectedError(Exception):
    """What no code but this test's raises."""


def failing(place, calls_before):
    """SOUND, one of whose layers raises after so many calls."""
    sound, calls = SOUND.layers[place], []

    def function(params, x, batch):
        calls.append(1)
        if len(calls) > calls_before:
            raise InjectedError
        return sound.form.full(params, x, batch)

    layers = list(SOUND.layers)
    layers[place] = Layer(sound.name, rowwise(function), sound.reads)
    return Model(tuple(layers))


def workers_strategy():
    links = st.none() | st.builds(Link, disorder=st.integers(0, 10**6))
    return st.lists(st.builds(Cpu, link=links), min_size=1, max_size=4)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_gradients_by_any_schedule_on_any_workers_with_failures(data):
    before = threading.active_count()
    plan = data.draw(strategies.plans(4) | unfused_plans(4), "plan")
    workers, count = data.draw(workers_strategy(), "workers"), data.draw(st.integers(1, 4), "microbatches")
    blocks = data.draw(st.integers(1, count), "blocks")
    schedule = data.draw(runnable_schedules(Workload(plan.slots, count, blocks), len(workers)), "schedule")
    fails = data.draw(st.integers(0, 99), "fails") < FAILING_PERCENT
    model = failing(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))) if fails else SOUND
    recompute = data.draw(st.sampled_from(["stage", "layer"]), "recompute")
    function = value_and_grad(
        model, OBJECTIVE, plan=plan, workers=workers, microbatches=count, blocks=blocks, schedule=schedule,
        recompute=recompute,
    )  # fmt: skip
    try:
        result, grads = function(PARAMS, BATCHES[0])
    except InjectedError as error:
        assert fails, "an error that nobody has injected"
        assert any("rpfunc: in task" in note for note in error.__notes__)  # noqa: PT017  (raised by some examples only)
    else:
        wanted, wanted_grads = value_and_grad(SOUND, OBJECTIVE, microbatches=count, blocks=blocks)(PARAMS, BATCHES[0])
        assert_equal_bits({"loss": result.loss, **grads}, {"loss": wanted.loss, **wanted_grads})
    assert threading.active_count() == before


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    workers=workers_strategy(),
    asynchronous=st.booleans(),
    donate=st.booleans(),
    ending=st.sampled_from(["all", "all", "all", "abandoned", "failing layer", "failing batch"]),
    place=st.integers(0, 3),
    calls_before=st.integers(0, 40),
    stop=st.integers(1, 4),
)
def test_training_that_ends_in_every_way(workers, asynchronous, donate, ending, place, calls_before, stop):
    before = threading.active_count()
    model = failing(place, calls_before) if ending == "failing layer" else SOUND

    def batches():
        for number, batch in enumerate(BATCHES):
            if ending == "failing batch" and number == stop:
                raise InjectedError
            yield batch

    state = State.create(tree.map(torch.clone, PARAMS), OPTIMIZER)
    options = {"objective": OBJECTIVE, "optimizer": OPTIMIZER, "microbatches": 2, "asynchronous": asynchronous}
    wanted = train_steps(State.create(PARAMS, OPTIMIZER), BATCHES, model=SOUND, **options)
    found = train_steps(state, batches(), model=model, workers=workers, donate=donate, **options)
    number = 0
    try:
        for number, ((state, _), (right, _)) in enumerate(zip(found, wanted, strict=False), start=1):
            if number == stop and ending == "abandoned":
                break
            last = state, right
    except InjectedError:
        assert ending in ("failing layer", "failing batch")
    found.close()
    wanted.close()
    if ending == "all":
        assert number == len(BATCHES)
    if number and ending != "abandoned":
        state, right = last
        assert_equal_bits(state.params, right.params)  # the last state is whole, whatever came after it
    assert threading.active_count() == before


def test_memory_stays_flat():
    """Tensors that are alive after a run: none, of any kind of worker."""

    def alive():
        gc.collect()
        return sum(1 for each in gc.get_objects() if type(each) is torch.Tensor)

    def train():
        state = State.create(tree.map(torch.clone, PARAMS), OPTIMIZER)
        for _ in train_steps(
            state, BATCHES, model=SOUND, objective=OBJECTIVE, optimizer=OPTIMIZER, asynchronous=True, donate=True,
            workers=[Cpu(), Cpu(link=Link(disorder=0))], plan="F0:2 X2:4 B0:1 B1:2", microbatches=2,
        ):  # fmt: skip
            pass

    train()
    before = alive()
    for _ in range(5):
        train()
    assert alive() == before
