"""Workers with a memory limit: what they need is known before, what they hold is measured, and neither is exceeded."""

import gc
import threading
import weakref
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensor

from rpfunc import Batch, Layer, Model, Runtime, State, memory, optim, plan, random, train_steps, tree, value_and_grad
from rpfunc.errors import MemoryLimitError, ModelError, OptionsError
from rpfunc.meter import Following, Meter
from rpfunc.models import decoder
from rpfunc.models.decoder import DecoderConfig
from rpfunc.objectives import Objective, sft
from rpfunc.runtime import Cpu, Link
from rpfunc.runtime import room as rooms
from rpfunc.runtime import session as sessions
from rpfunc.stream import rowwise

CONFIG = DecoderConfig(vocabulary=50, width=32, layers=2, heads=4, kv_heads=2, head_size=8, mlp_width=48)
MODEL, PARAMS = decoder.model(CONFIG), decoder.init(CONFIG, random.key(0))
PLENTY = 1 << 40
PLANS = ["X0:4", "F0:2 X2:4 B0:2", "F0:1 F1:2 X2:4 B1:2 B0:1", "F0:2 F2:4 B2:4 B0:2"]


def make_batch(examples, rows):
    tokens = (random.uniform(random.key(1), (examples, rows)) * CONFIG.vocabulary).long()
    return Batch(row={"tokens": tokens, "labels": tokens})


def run(batch, num_workers=1, memory_bytes=PLENTY, link=None, **how):
    workers = [Cpu(1, link, memory_bytes)] * num_workers
    return value_and_grad(MODEL, sft(), workers=workers, microbatches=batch.num_examples, **how)(PARAMS, batch)


def needed(batch, *args, **how):
    """Returns the bytes that the refusal of a limit of one byte says would do, the most of any worker."""
    with pytest.raises(MemoryLimitError) as caught:
        run(batch, *args, memory_bytes=1, **how)
    words = str(caught.value).split("memory_bytes=")[1:]
    return max(int(word.split()[0]) for word in words)


WAYS = [{}, {"chunk": 8, "head_chunk": 5}, {"chunk": 8, "order": "chunk"}, {"compute_dtype": torch.bfloat16}]


@settings(max_examples=max(3, settings().max_examples // 8))
@given(
    st.integers(1, 4),
    st.sampled_from(PLANS),
    st.sampled_from(WAYS),
    st.sampled_from([None, Link(), Link(disorder=3)]),
    st.integers(1, 3),
    st.integers(2, 24),
)
def test_what_is_held_is_no_more_than_was_planned_and_no_bit_differs(num_workers, text, how, link, examples, rows):
    batch = make_batch(examples, rows)
    result, grads = run(batch, num_workers, link=link, plan=text, **how)
    other, unlimited = run(batch, num_workers, memory_bytes=None, link=link, plan=text, **how)
    assert torch.equal(result.loss, other.loss)
    assert all(map(torch.equal, tree.leaves(grads), tree.leaves(unlimited)))
    assert other.peak_bytes == (None,) * num_workers
    assert 0 < max(result.peak_bytes) <= needed(batch, num_workers, link=link, plan=text, **how)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_the_limit_that_is_said_to_do_does_and_one_byte_less_does_not(how):
    batch = make_batch(2, 15)
    need = needed(batch, 2, plan="F0:2 X2:4 B0:2", **how)
    run(batch, 2, memory_bytes=need, plan="F0:2 X2:4 B0:2", **how)
    with pytest.raises(MemoryLimitError, match=f"its memory_bytes is {need - 1:,}; memory_bytes={need} would do"):
        run(batch, 2, memory_bytes=need - 1, plan="F0:2 X2:4 B0:2", **how)


@pytest.mark.parametrize(("how", "counts"), [({}, (1, 2, 3, 4)), ({"chunk": 16}, (1, 3))], ids=str)
def test_peak_and_longest_sequence_are_the_same_for_one_to_four_workers(how, counts):
    how = {**how, "plan": "F0:2 X2:4 B0:2"}
    rows, budget = 24, needed(make_batch(4, 24), 1, **how)
    peaks = set()
    for num_workers in counts:
        result, _ = run(make_batch(4, rows), num_workers, memory_bytes=budget, **how)
        peaks.add(max(result.peak_bytes))
    with pytest.raises(MemoryLimitError):
        run(make_batch(4, rows + 1), counts[-1], memory_bytes=budget, **how)
    assert peaks == {budget}


def test_what_is_measured_is_what_the_allocator_says():
    batch = make_batch(1, 400)
    found = run(batch)[0].peak_bytes[0]
    exact = memory.peak(lambda: value_and_grad(MODEL, sft())(PARAMS, batch)).peak_bytes
    assert found == pytest.approx(exact, rel=0.02)


def test_every_worker_that_needs_more_is_named():
    with pytest.raises(MemoryLimitError) as caught:
        run(make_batch(2, 8), 2, memory_bytes=1000, plan="F0:2 X2:4 B0:2")
    text = str(caught.value)
    assert text.startswith("worker memory: 2 problems\n  - worker 0 needs ")
    assert "while it works on 0B0), its memory_bytes is 1,000; memory_bytes=" in text
    assert "\n  - worker 1 needs " in text
    assert "while it works on 1X0)" in text


def test_a_layer_that_takes_more_than_was_planned_is_stopped():
    """What no run without data can tell, the limit that holds while tasks run does."""

    def hungry(params, x, batch):
        planned = isinstance(batch.row["x"], FakeTensor)
        return params["w"] * sum([batch.row["x"] + float(copy) for copy in range(1 if planned else appetite)])

    objective = Objective(
        "sum",
        lambda batch: batch,
        lambda batch: torch.ones(()),
        lambda output, batch: output,
        lambda sums, *_: sums.sum(),
    )
    model = Model((Layer("a", rowwise(hungry), "a"),))
    function = value_and_grad(model, objective, workers=[Cpu(memory_bytes=100_000)])
    batch, params, before = (
        Batch(row={"x": torch.ones(1, 1000)}),
        {"a": {"w": torch.ones(())}},
        threading.active_count(),
    )
    appetite = 1
    function(params, batch)
    appetite = 100
    with pytest.raises(MemoryLimitError, match=r"worker 0: .* bytes live at once, its memory_bytes is 100,000"):
        function(params, batch)
    assert threading.active_count() == before


def by_number(params, x, batch):
    """As a mixture of experts that picks its rows."""
    rows = (batch.row["x"] > 0).nonzero(as_tuple=True)
    return batch.row["x"].index_put(rows, params["w"] * batch.row["x"][rows])


def by_value(params, x, batch):
    return batch.row["x"] * params["w"] * (2 if batch.row["x"].max().item() > 0 else 1)


@pytest.mark.parametrize("function", [by_number, by_value])
def test_what_numbers_alone_can_tell_is_refused_by_name_and_runs_without_a_limit(function):
    objective = Objective(
        "sum",
        lambda batch: batch,
        lambda batch: torch.ones(()),
        lambda output, batch: output,
        lambda sums, *_: sums.sum(),
    )
    model, params = Model((Layer("picks", rowwise(function), "a"),)), {"a": {"w": torch.ones(())}}
    batch = Batch(row={"x": torch.ones(2, 5)})
    assert value_and_grad(model, objective, workers=2)(params, batch)[0].loss.isfinite()
    words = r"^memory: .* depends on numbers, .*\(in layer 'picks', forward pass\).*a run without a memory limit$"
    for limit in (1, PLENTY):
        with pytest.raises(ModelError, match=words):
            value_and_grad(model, objective, workers=[Cpu(memory_bytes=limit)])(params, batch)
    with pytest.raises(ModelError, match=words):
        plan.memory(model, objective, params, batch)


@pytest.mark.parametrize(
    ("part", "how"), [("working", {"link": Link()}), ("params", {"compute_dtype": torch.bfloat16})], ids=str
)
def test_one_missing_part_of_the_plan_would_be_found_out(monkeypatch, part, how):
    whole = sessions.needs

    def lacking(*args):
        return [need and need._replace(**{part: 0}) for need in whole(*args)]

    monkeypatch.setattr(sessions, "needs", lacking)
    need = needed(make_batch(1, 40), plan="X0:4", **how)
    monkeypatch.setattr(sessions, "needs", whole)
    assert max(run(make_batch(1, 40), plan="X0:4", **how)[0].peak_bytes) > need


def test_a_meter_counts_what_lives():
    meter = Meter()
    with Following(meter):
        a = torch.ones(100)
        b = a.view(10, 10) + 1
        c = b[0]
        assert meter.live_bytes == 800
        del a
        assert meter.live_bytes == 400
        b.add_(1)
        del b
        assert meter.live_bytes == 400  # c is a part of it
    other = c + 1
    assert meter.live_bytes == 400
    with Following(meter):
        kept = torch.ones(5)
    meter.hand_over([kept.untyped_storage(), other.untyped_storage()])
    assert (meter.live_bytes, meter.peak_bytes) == (20, 800)
    del c
    assert meter.live_bytes == 20
    meter.hand_over()
    del kept
    assert meter.live_bytes == 0


def test_threads_that_share_a_meter_lose_no_count():
    meter = Meter()

    def work():
        with Following(meter):
            for _ in range(300):
                (torch.ones(10) + 1).sum()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert meter.live_bytes == 0
    assert 40 <= meter.peak_bytes <= 4 * 84


def test_a_meter_keeps_nothing_alive():
    meter = Meter()
    with Following(meter):
        tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    del tensor
    assert gone() is None


@pytest.mark.parametrize("limit", [0, -5, 1.5, "1GiB", True, float("inf")])
def test_limits_that_are_no_numbers_of_bytes_are_refused(limit):
    with pytest.raises(OptionsError, match=r"worker: memory_bytes is .*, it must be at least 1 byte, or None"):
        Cpu(memory_bytes=limit)


def counted(monkeypatch):
    """Returns a list that grows by one with each answer that is found anew."""
    found, whole = [], rooms.sizes_of

    def counting(question):
        found.append(question)
        return whole(question)

    monkeypatch.setattr(rooms, "sizes_of", counting)
    return found


SUM = Objective(
    "sum", lambda batch: batch, lambda batch: torch.ones(()), lambda output, batch: output, lambda sums, *_: sums.sum()
)


def tiny(rows=3, examples=1, dtype=torch.float32, width=2, **leaves):
    return Batch(row={"x": torch.ones(examples, rows, width, dtype=dtype)}, **leaves)


def tiny_model(layer=lambda params, x, batch: batch.row["x"] @ params["w"].to(batch.row["x"].dtype)):
    return Model((Layer("x", rowwise(layer), "x"),))


def tiny_params(width=2, dtype=torch.float32):
    return {"x": {"w": torch.ones(width, 2, dtype=dtype)}}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("workers", [[Cpu(memory_bytes=PLENTY)] * 2, [Cpu(link=Link(), memory_bytes=PLENTY)]])
def test_a_later_batch_may_have_another_shape_while_parameters_are_being_made(asynchronous, donate, workers):
    batches = [tiny(3), tiny(3), tiny(5), tiny(4, examples=2), tiny(3), tiny(5)]
    optimizer = optim.adamw(0.1)
    how = {"model": tiny_model(), "objective": SUM, "optimizer": optimizer, "asynchronous": asynchronous}
    found = []
    for each in (workers, len(workers)):
        begun = State.create(tiny_params(), optimizer)
        for state, _ in train_steps(begun, batches, **how, donate=donate, workers=each):
            last = state.params["x"]["w"].clone()
        found.append(last)
    assert torch.equal(*found)


def test_one_runtime_finds_each_answer_once_whoever_asks(monkeypatch):
    found, optimizer, model = counted(monkeypatch), optim.sgd(0.1), tiny_model()
    with Runtime([Cpu(memory_bytes=PLENTY)] * 2) as runtime:
        how = {"workers": runtime, "plan": "X0:1"}
        for _ in range(3):  # shapes that alternate, in calls of their own
            for rows in (3, 5):
                value_and_grad(model, SUM, **how)(tiny_params(), tiny(rows))
        assert len(found) == 2
        for _ in range(2):
            state = State.create(tiny_params(), optimizer)
            batches = [tiny(rows) for rows in (3, 5, 3, 5)]
            list(train_steps(state, batches, model=model, objective=SUM, optimizer=optimizer, **how))
        assert len(found) == 2
        for _ in range(3):
            key = random.fold_in(random.key(0), len(found))
            value_and_grad(model, SUM, **how)(tiny_params(), tiny(3, constant={"key": key, "rate": 0.1 * len(found)}))
        assert len(found) == 3


def test_answers_that_are_remembered_are_a_few(monkeypatch):
    found, model = counted(monkeypatch), tiny_model()
    with Runtime([Cpu(memory_bytes=PLENTY)]) as runtime:
        for rows in [*range(1, 11), 10, 1]:
            value_and_grad(model, SUM, workers=runtime)(tiny_params(), tiny(rows))
    assert [question.microbatches[0].leaves[-1].shape[1] for question in found] == [*range(1, 11), 1]


OTHERS = {
    "rows": {"batch": tiny(4)},
    "row dtype": {"batch": tiny(dtype=torch.float64)},
    "example": {"batch": tiny(example={"w": torch.ones(1, 7)})},
    "another example": {"batch": tiny(example={"w": torch.ones(1, 8)})},
    "group": {"batch": tiny(group={"w": torch.ones(1, 7)})},
    "constant": {"batch": tiny(constant={"w": torch.ones(7)})},
    "constant dtype": {"batch": tiny(constant={"w": torch.ones(7, dtype=torch.float64)})},
    "constant size": {"batch": tiny(constant={"w": 7})},
    "another constant size": {"batch": tiny(constant={"w": 8})},
    "truth": {"batch": tiny(constant={"w": True})},
    "one": {"batch": tiny(constant={"w": 1})},
    "object": {"batch": tiny(constant={"w": object()})},
    "parameter shape": {"params": tiny_params(3), "batch": tiny(width=3)},
    "parameter dtype": {"params": tiny_params(dtype=torch.float64)},
    "frozen": {"frozen": True},
    "compute dtype": {"compute_dtype": torch.bfloat16},
    "recompute": {"recompute": "layer"},
    "chunk": {"chunk": 2},
    "head chunk": {"head_chunk": 2},
    "order": {"chunk": 2, "order": "chunk"},
    "plan": {"plan": "F0:1 B0:1"},
    "model": {"model": tiny_model()},
    "objective": {"objective": replace(SUM, name="other")},
    "microbatches": {"batch": tiny(examples=2), "microbatches": 2},
    "blocks": {"batch": tiny(examples=2), "microbatches": 2, "blocks": 2},
    "halves": {"plan": "F0:1 B0:1", "schedule": "0F0 0I0 0W0"},
}


def test_whatever_a_size_may_follow_from_is_asked_anew(monkeypatch):
    found, plain = counted(monkeypatch), tiny_model()
    monkeypatch.setattr(rooms, "remembering", lambda: lru_cache(maxsize=None)(rooms.sizes_of))
    monkeypatch.setattr("rpfunc.runtime.workers.remembering", rooms.remembering)
    with Runtime([Cpu(memory_bytes=PLENTY)]) as runtime:

        def ask(params=None, batch=None, model=plain, objective=SUM, **how):
            function = value_and_grad(model, objective, workers=runtime, **how)
            function(tiny_params() if params is None else params, tiny() if batch is None else batch)

        for other in ({}, *OTHERS.values()):
            ask(**other)
        assert len(found) == 1 + len(OTHERS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ask()
        assert len(found) == 2 + len(OTHERS)
        for other in ({}, *OTHERS.values()):
            ask(**other)
        assert len(found) == 2 + len(OTHERS)


def test_what_has_no_hash_is_asked_anew_each_time(monkeypatch):
    found = counted(monkeypatch)
    with Runtime([Cpu(memory_bytes=PLENTY)]) as runtime:
        value_and_grad(tiny_model(), SUM, workers=runtime)(tiny_params(), tiny())
        unhashable = replace(found[0], setting=[])
        assert runtime.sizes(unhashable) == runtime.sizes(unhashable) == runtime.sizes(found[0])
    assert len(found) == 3


def test_what_is_remembered_holds_no_tensor_of_an_iteration():
    params, batch, model = tiny_params(), tiny(example={"w": torch.ones(1, 7)}), tiny_model()
    with Runtime([Cpu(memory_bytes=PLENTY)]) as runtime:
        value_and_grad(model, SUM, frozen=True, workers=runtime)(params, batch)
        gone = [weakref.ref(params["x"]["w"]), weakref.ref(batch.row["x"]), weakref.ref(batch.example["w"])]
        del params, batch
        gc.collect()
        assert [each() for each in gone] == [None] * 3


def test_leaves_of_all_kinds_that_are_copied_to_a_device_are_planned_for():
    batch = tiny(example={"w": torch.ones(1, 1000)}, constant={"w": torch.ones(500)})
    function = value_and_grad(tiny_model(), SUM, workers=[Cpu(link=Link(), memory_bytes=PLENTY)])
    peak = function(tiny_params(), batch)[0].peak_bytes[0]
    assert peak > 6000
    with pytest.raises(MemoryLimitError, match=r"inputs [61]") as caught:
        value_and_grad(tiny_model(), SUM, workers=[Cpu(link=Link(), memory_bytes=1)])(tiny_params(), batch)
    assert int(str(caught.value).split("memory_bytes=")[1].split()[0]) >= peak
