"""No timing can change a result: every run's record is free of races, and no wait can be spared."""

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc import Cpu, Plan, Runtime, State, optim, train_steps, tree
from rpfunc.errors import ModelError
from rpfunc.runtime import Link, session
from rpfunc.runtime.operations import gradient_waits, operations, version_of
from rpfunc.runtime.progress import Happened
from rpfunc.runtime.tasks import Work
from rpfunc.schedule import Workload
from rpfunc.schedule.validate import halved_as
from rpfunc.stream.streaming import Streaming
from rpfunc.testing import assert_equal_bits, exact, races
from rpfunc.testing.schedules import runnable_schedules

MODEL, OBJECTIVE, OPTIMIZER = exact.model(("square", "relu")), exact.linear(), optim.adamw(0.05)
GENERATOR = torch.Generator().manual_seed(0)
PARAMS = tree.map(lambda leaf: torch.randn(leaf.shape, generator=GENERATOR).double(), exact.init(("square", "relu")))
BATCHES = [exact.batch(6, 3, seed=seed) for seed in range(4)]
PLANS = ["X0:4", "F0:2 X2:4 B0:1 B1:2", "F0:1 F1:4 B0:2 B2:4", "F0:1 F1:2 F2:4 B0:1 B1:2 B2:4"]


def _slowly(*arguments):
    time.sleep(0.3)  # longer than an iteration
    return OPTIMIZER.leafwise.scalars(*arguments)


SLOW_OPTIMIZER = replace(OPTIMIZER, leafwise=replace(OPTIMIZER.leafwise, scalars=_slowly))

REASONS = [
    "inputs are there",
    "parameters are there",
    "outputs are made",
    "sums are made",
    "handed on",
    "sums go on",
    "version is complete",
    "gradient is complete",
    "room for inputs",
    "room for outputs",
    "room for a run",
]


def train(
    workers,
    *,
    plan="F0:1 F1:4 B0:2 B2:4",
    asynchronous=True,
    donate=True,
    record=True,
    schedule=None,
    blocks=1,
    optimizer=OPTIMIZER,
):
    """Returns (the states' parameters, the trace)."""
    state = State.create(tree.map(torch.clone, PARAMS), OPTIMIZER)
    found = []
    with Runtime(workers, record=record) as runtime:
        steps = train_steps(
            state, BATCHES, model=MODEL, objective=OBJECTIVE, optimizer=optimizer, asynchronous=asynchronous,
            donate=donate, plan=plan, workers=runtime, microbatches=6, schedule=schedule, blocks=blocks,
        )  # fmt: skip
        for each, _ in steps:
            found.append(tree.map(torch.clone, each.params))
        return found, runtime.recorder.trace


@settings(max_examples=25)
@given(
    seeds=st.lists(st.none() | st.integers(0, 10**6), min_size=1, max_size=3),
    plan=st.sampled_from(PLANS),
    asynchronous=st.booleans(),
    donate=st.booleans(),
    blocks=st.integers(1, 6),
)
def test_no_run_has_a_race(seeds, plan, asynchronous, donate, blocks):
    workers = [Cpu(link=None if seed is None else Link(disorder=seed)) for seed in seeds]
    found, trace = train(workers, plan=plan, asynchronous=asynchronous, donate=donate, blocks=blocks)
    assert races(trace) == []
    assert len({access.event for access in trace}) == len(trace)
    wanted, _ = train((), plan="X0:4", asynchronous=asynchronous, donate=False, blocks=blocks)
    assert_equal_bits(found, wanted)


# Microbatches 1 and 2 of the last stage's backward pass run elsewhere than 0: their sums go on from worker to worker.
TRAVELLING = "0F0 0F1 0F2 0F3 0F4 0F5 1B1 0B0 0B1 0B2 0B3 0B4 0B5\n1F0 1F1 1F2 1F3 1F4 1F5 1B0 1B2 1B3 1B4 1B5"


def without(reason):
    def fewer(*arguments):
        lines, trails = operations(*arguments)
        spare = [
            {
                channel: [each._replace(waits=tuple(w for w in each.waits if w.reason != reason)) for each in own]
                for channel, own in line.items()
            }
            for line in lines
        ]
        return spare, trails

    return fewer


def leave_out(reason, monkeypatch):
    """Runs from here on do without the waits of one reason."""
    if reason == "gradient is complete":
        monkeypatch.setattr(session, "gradient_waits", lambda *arguments: {})
    else:
        monkeypatch.setattr(session, "operations", without(reason))


@pytest.mark.parametrize("reason", REASONS)
def test_every_wait_is_needed(reason, monkeypatch):
    """Without it the record has a race, if the run gets that far."""
    leave_out(reason, monkeypatch)
    caught = []
    for seed in range(6):
        try:
            _, trace = train([Cpu(link=Link(disorder=seed)), Cpu(link=Link(disorder=seed))], schedule=TRAVELLING)
            caught += races(trace)
        except (KeyError, RuntimeError, IndexError, StopIteration, ModelError) as error:
            caught.append(repr(error))
    assert caught


@pytest.mark.parametrize("reason", REASONS)
def test_disorder_shows_that_a_wait_is_missing(reason, monkeypatch):
    """Copies that end late and buffers of NaN give a wrong number or an error, for some seed."""
    leave_out(reason, monkeypatch)
    wanted, _ = train((), plan="X0:4", donate=False)
    for seed in range(30):
        # where room is what is waited for, what is handed on leaves slowly, so that all before it piles up
        link = Link(disorder=seed, download=2e3) if reason.startswith("room") else Link(disorder=seed)
        workers, options = [Cpu(link=link), Cpu(link=link)], {"schedule": TRAVELLING}
        if reason == "room for a run":  # short runs that wait for nothing else
            workers, options = workers[:1], {"plan": PLANS[3]}
        if reason == "version is complete":
            options["optimizer"] = SLOW_OPTIMIZER
        try:
            found, _ = train(workers, record=False, **options)
        except (KeyError, RuntimeError, IndexError, ModelError):
            return
        pairs = zip(tree.leaves(found), tree.leaves(wanted), strict=True)
        if len(found) != len(wanted) or any(not torch.equal(one, other) for one, other in pairs):
            return
    raise AssertionError(f"without {reason!r} all results were right")


@settings(max_examples=100)
@given(st.data())
def test_no_schedule_deadlocks(data):
    """Channels go in order and events happen once: nothing waits for ever if and only if there is no cycle.

    So one walk over the graph covers every order in which threads could run. Some workers share the host's memory.
    """
    plan = Plan.parse(data.draw(st.sampled_from(PLANS), "plan"))
    num_workers, num_microbatches = (
        data.draw(st.integers(1, 3), "workers"),
        data.draw(st.integers(1, 4), "microbatches"),
    )
    blocks = data.draw(st.integers(1, num_microbatches), "blocks")
    shares = data.draw(st.lists(st.booleans(), min_size=num_workers, max_size=num_workers), "shares")
    trails, channels, versions = [], {}, {}
    for iteration in range(3):
        workload = Workload(plan.slots, num_microbatches, blocks)
        schedule = data.draw(runnable_schedules(workload, num_workers), f"schedule {iteration}")
        work = Work(MODEL, OBJECTIVE, plan, Streaming(), "stage", halved_as(schedule, workload))
        lines, trails = operations(iteration, schedule, work, shares, iteration - 1 if iteration > 1 else None, trails)
        for worker, line in enumerate(lines):
            for channel, own in line.items():
                channels.setdefault((worker, channel), []).extend(
                    (Happened(iteration, channel, each.task), [wait.event for wait in each.waits]) for each in own
                )
        versions[iteration] = gradient_waits(iteration, lines, work)
        gradients = [wait.event for waits in versions[iteration].values() for wait in waits]
        channels.setdefault("update", []).extend(
            (version_of(iteration + 1, name), gradients) for layer in MODEL.layers for name in layer.subtrees
        )
    happened, places = set(), dict.fromkeys(channels, 0)
    moved = True
    while moved:
        moved = False
        for channel, own in channels.items():
            while places[channel] < len(own) and happened.issuperset(own[places[channel]][1]):
                happened.add(own[places[channel]][0])
                places[channel] += 1
                moved = True
    assert all(places[channel] == len(own) for channel, own in channels.items())
