"""Measured and predicted peaks agree, and budgets are kept."""

import threading
from dataclasses import replace

import pytest
import torch

from rpfunc import Batch, Layer, Model, memory, plan, random, tree, value_and_grad
from rpfunc.errors import BatchError, ModelError, OptionsError, PlanError
from rpfunc.models import decoder
from rpfunc.models.decoder import DecoderConfig
from rpfunc.objectives import dpo, kto, sft
from rpfunc.plan import predict
from rpfunc.stream import attending, recurrent, rowwise
from rpfunc.stream.streaming import Streaming

CONFIG = DecoderConfig(vocabulary=300, width=48, layers=1, heads=4, kv_heads=2, head_size=12, mlp_width=96)
MODEL = decoder.model(CONFIG)
PARAMS = decoder.init(CONFIG, random.key(0))

SMALL = Model(
    (
        Layer("embed", rowwise(lambda p, x, batch: p[batch.row["tokens"]]), "table"),
        Layer("square", rowwise(lambda p, x, batch: x + (x @ p).square()), "weight"),
        Layer("head", rowwise(lambda p, x, batch: x @ p.T), "table"),
    )
)
SMALL_PARAMS = {"table": torch.ones(300, 8), "weight": torch.ones(8, 8)}

WAYS = [
    {},
    {"chunk": 64},
    {"chunk": 100, "head_chunk": 50},
    {"chunk": 50, "head_chunk": 50, "keep_attention": 0.5},
    {"chunk": 100, "order": "chunk"},
    {"chunk": 70, "head_chunk": 35, "order": "chunk"},
]
SHAPES = [(1, 130, 1), (1, 200, 1), (2, 140, 1), (4, 100, 2)]


def batch(examples, rows):
    tokens = (random.uniform(random.key(1), (examples, rows)) * CONFIG.vocabulary).long()
    return Batch(row={"tokens": tokens, "labels": tokens})


@pytest.mark.parametrize(("examples", "rows", "microbatches"), SHAPES)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_predicted_peak_is_the_measured_one(examples, rows, microbatches, way):
    given, how = batch(examples, rows), {**way, "microbatches": microbatches}
    function = value_and_grad(MODEL, sft(), **how)
    function(PARAMS, given)  # what is allocated once for all is not the run's
    measured = memory.peak(lambda: function(PARAMS, given)).peak_bytes
    predicted = plan.memory(MODEL, sft(), PARAMS, given, **how)
    assert predicted == pytest.approx(measured, rel=0.1)


def test_frozen_leaves_and_objectives_that_are_not_linear_are_predicted_too():
    pairs = Batch(row=batch(4, 100).row, example={"reference_logprobs": torch.zeros(4)}, group_size=2)
    how = {"chunk": 40, "frozen": {"embedding": True, "block0": True, "norm": False}}
    function = value_and_grad(MODEL, dpo(), **how)
    function(PARAMS, pairs)
    measured = memory.peak(lambda: function(PARAMS, pairs)).peak_bytes
    assert plan.memory(MODEL, dpo(), PARAMS, pairs, **how) == pytest.approx(measured, rel=0.1)


def test_an_objective_that_asks_the_whole_batch_first_is_predicted_too():
    yes = torch.tensor([True, False, True, False])
    example = {"reference_logprobs": torch.zeros(4), "desirable": yes, "kl": ~yes}
    given = Batch(row=batch(4, 60).row, example=example)
    for how in ({}, {"chunk": 20}, {"chunk": 20, "microbatches": 3}):
        function = value_and_grad(MODEL, kto(), **how)
        function(PARAMS, given)
        measured = memory.peak(lambda function=function: function(PARAMS, given)).peak_bytes
        assert plan.memory(MODEL, kto(), PARAMS, given, **how) == pytest.approx(measured, rel=0.1)


def test_what_a_run_would_refuse_is_refused():
    given = batch(2, 10)
    with pytest.raises(
        ModelError, match=r"2 problems\n  - params lacks subtree 'table'\n  - params lacks subtree 'weight'"
    ):
        plan.memory(SMALL, sft(), {}, given)
    with pytest.raises(BatchError, match="sft: needs row leaf 'labels'"):
        plan.memory(SMALL, sft(), SMALL_PARAMS, Batch(row={"tokens": given.row["tokens"]}))
    with pytest.raises(OptionsError, match="microbatches is 0, it must be at least 1"):
        plan.memory(SMALL, sft(), SMALL_PARAMS, given, microbatches=0)


RECURRENT = Model(
    (
        *SMALL.layers[:-1],
        Layer(
            "sum",
            recurrent(
                lambda p, x, state, batch: (state[:, None] + x.cumsum(1), state + x.sum(1)),
                lambda p, batch: torch.zeros(batch.num_examples, 8),
            ),
        ),
        SMALL.layers[-1],
    )
)
BOTH_SIDES = Model(
    (
        *SMALL.layers[:-1],
        Layer(
            "mean",
            attending(lambda p, x, b: x * 2, lambda p, x, kv, b: x + kv.mean(1, keepdim=True), causal=False),
        ),
        SMALL.layers[-1],
    )
)
CASES = {"causal": (MODEL, PARAMS), "recurrent": (RECURRENT, SMALL_PARAMS), "both sides": (BOTH_SIDES, SMALL_PARAMS)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "way",
    [
        {"chunk": 8, "head_chunk": 3},
        {"chunk": 8, "order": "chunk", "microbatches": 3},
        {"chunk": 8, "keep_attention": 1.0},
    ],
    ids=str,
)
def test_of_many_chunks_the_last_tell_what_all_of_them_take(name, way, monkeypatch):
    """Every chunk really run, or the last two alone: the same peak, but for a number for each chunk of a head."""
    if "order" in way and name == "both sides":
        pytest.skip("looks ahead")
    model, params = CASES[name]
    given = batch(4, 60)
    found = plan.memory(model, sft(), params, given, **way)
    monkeypatch.setattr(predict, "FewChunks", int)
    assert found == pytest.approx(plan.memory(model, sft(), params, given, **way), rel=0.005)


def test_the_number_of_operations_does_not_depend_on_the_length(monkeypatch):
    """In a longer sequence attention alone takes a few more, block by block of the rows before a chunk."""
    counts = []

    class Counting(predict.Following):
        def __torch_dispatch__(self, *args, **kwargs):
            counts[-1] += 1
            return super().__torch_dispatch__(*args, **kwargs)

    monkeypatch.setattr(predict, "Following", Counting)
    for rows in (100, 300, 1900):
        counts.append(0)
        plan.memory(MODEL, sft(), PARAMS, batch(1, rows), chunk=25, head_chunk=5)
    assert counts[0] == counts[1] == counts[2] > 100


def test_the_longest_sequence_of_a_budget_fits_and_the_next_does_not():
    def peak(rows):
        return plan.memory(SMALL, sft(), SMALL_PARAMS, batch(1, rows), chunk=128)

    assert plan.max_sequence(peak, peak(384), granularity=64) == 384
    with pytest.raises(PlanError, match="no sequence fits"):
        plan.max_sequence(peak, 1000, granularity=64)


@pytest.mark.parametrize("intercept", [0, 10_000])
@pytest.mark.parametrize("bend", [0, 1e-3])
def test_the_search_asks_few_questions_of_any_growing_peak(intercept, bend):
    asked = []

    def peak(rows):
        asked.append(rows)
        return int(intercept + 50 * rows + bend * rows**2)

    longest = plan.max_sequence(peak, 3_000_000, granularity=16)
    assert peak(longest) <= 3_000_000 < peak(longest + 16)
    assert len(asked) < 30


@pytest.mark.parametrize("power", [0, 0.5, 1, 2, 4])
def test_peaks_of_any_bend_are_searched_in_few_questions(power):
    asked = []

    def peak(rows):
        asked.append(rows)
        return int(1000 + (rows // 100) ** power)

    for budget in (1001, 1010, 2000, 10**6):
        asked.clear()
        longest = plan.max_sequence(peak, budget, granularity=7, largest=10**6)
        assert len(asked) < 60
        assert all(rows % 7 == 0 and rows <= 10**6 for rows in asked)
        assert peak(longest) <= budget
        assert peak(longest + 7) > budget or longest + 7 > 10**6


def test_the_longest_sequence_is_a_multiple_of_the_granularity_up_to_the_largest():
    assert plan.max_sequence(lambda rows: rows, 10**6, granularity=300, largest=1000) == 900
    with pytest.raises(PlanError, match="largest is 100, it must be at least the granularity, 300"):
        plan.max_sequence(lambda rows: rows, 10**6, granularity=300, largest=100)
    with pytest.raises(PlanError, match=r"2 problems\n  - granularity is 0, .*\n  - largest is 2.5, "):
        plan.max_sequence(lambda rows: rows, 10**6, granularity=0, largest=2.5)


def test_an_endless_budget_gives_the_largest():
    assert plan.max_sequence(lambda rows: rows, float("inf"), largest=1000) == 896


@pytest.mark.parametrize("answer", [float("nan"), -1, "4", None, float("inf")], ids=repr)
def test_a_peak_that_is_no_number_of_bytes_is_refused(answer):
    with pytest.raises(PlanError, match=r"^max_sequence: the answer of peak_bytes\(128\) is "):
        plan.max_sequence(lambda rows: answer, 1000)
    with pytest.raises(PlanError, match=r"^choose_streaming: the answer of peak_bytes\(Streaming\(.*\)\) is "):
        plan.choose_streaming(SMALL, sft(), 300, 1000, lambda how: answer)


def test_a_budget_chooses_the_fastest_way_that_fits():
    given = batch(1, 300)

    def peak(how):
        return plan.memory(
            SMALL, sft(), SMALL_PARAMS, given, chunk=how.chunk, head_chunk=how.head_chunk, order=how.order
        )

    whole = peak(Streaming())
    assert plan.choose_streaming(SMALL, sft(), 300, whole, peak).streaming == Streaming()
    chosen = plan.choose_streaming(SMALL, sft(), 300, whole - 1, peak)
    assert chosen.streaming.chunk is not None
    assert chosen.peak_bytes == peak(chosen.streaming) < whole
    with pytest.raises(PlanError, match="no way to stream fits 1000 bytes; the smallest peak is"):
        plan.choose_streaming(SMALL, sft(), 300, 1000, peak)
    assert "not linear" in plan.choose_streaming(SMALL, dpo(), 300, whole, lambda how: 0).note


def test_smaller_heads_kept_attention_and_both_orders_are_searched():
    """A peak that only some settings bring under the budget, found wherever they are; the least is named else."""
    causal = decoder.model(replace(CONFIG, layers=3))

    def peak(how):
        if how.chunk is None:
            return 10_000
        return how.chunk + 10 * how.head_chunk + int(800 * how.keep_attention) + (0 if how.order == "chunk" else 50)

    def choose(budget, **options):
        return plan.choose_streaming(causal, sft(), 2000, budget, peak, **options)

    assert choose(10_000).streaming == Streaming()
    assert choose(64 + 10 * 32 + 50).streaming == Streaming(64, 32, "layer")
    assert choose(64 + 10 * 32).streaming == Streaming(64, 32, "chunk")
    assert choose(2000 + 10 * 128 + 50).streaming == Streaming(2000, 128, "layer")
    kept = choose(2000 + 10 * 128 + 50 + 450)
    assert kept.streaming == Streaming(2000, 128, "layer", keep_attention=0.5)
    assert kept.peak_bytes == peak(kept.streaming)
    assert choose(64 + 10 * 16, head_chunks=(16,), chunks=(64,)).streaming == Streaming(64, 16, "chunk")
    with pytest.raises(PlanError) as caught:
        choose(300)
    assert str(caught.value) == (
        "no way to stream fits 300 bytes; the smallest peak is 384 bytes, with Streaming(chunk=64, head_chunk=32, "
        "order='chunk', keep_attention=0.0)"
    )


def test_numbers_that_cannot_be_searched_are_refused():
    with pytest.raises(PlanError) as caught:
        plan.choose_streaming(SMALL, sft(), 0, -1, lambda how: 0, head_chunks=(), chunks=(64, 0))
    assert str(caught.value) == (
        "choose_streaming: 4 problems"
        "\n  - num_rows is 0, it must be at least 1"
        "\n  - budget_bytes is -1, it must be above 0"
        "\n  - chunks[1] is 0, it must be at least 1"
        "\n  - head_chunks is empty, it must hold a number of rows, for example 128"
    )


def test_measuring_sees_every_byte_once():
    found = memory.peak(lambda: [torch.zeros(1000) for _ in range(3)])
    assert (found.peak_bytes, found.kept_bytes) == (12_000, 12_000)
    found = memory.peak(lambda: [torch.zeros(1000).sum().item() for _ in range(3)])
    assert found.kept_bytes == 0
    assert 4_000 <= found.peak_bytes < 4_100
    assert tree.leaves(memory.peak(lambda: {"a": 1}).result) == [1]


@pytest.mark.parametrize("order", ["layer", "chunk"])
def test_no_gradient_of_a_large_heads_size_exists_beside_its_sum(order):
    width, vocabulary = 512, 2100  # 2^20 elements and more
    layers = (
        Layer("embed", rowwise(lambda p, x, batch: torch.nn.functional.embedding(batch.row["tokens"], p)), "table"),
        Layer("head", rowwise(lambda p, x, batch: torch.nn.functional.linear(x, p)), "head"),
    )
    params = {name: torch.ones(vocabulary, width) for name in ("table", "head")}
    function = value_and_grad(Model(layers), sft(), chunk=16, head_chunk=8, order=order)
    given = batch(1, 64)
    function(params, given)
    peak = memory.peak(lambda: function(params, given)).peak_bytes
    assert peak - sum(leaf.nbytes for leaf in params.values()) < params["head"].nbytes / 2


def test_threads_measure_in_turn_and_measurements_do_not_nest():
    found = {}

    def measure(count):
        found[count] = max(memory.peak(lambda: torch.ones(count) + torch.ones(count)).peak_bytes for _ in range(5))

    threads = [threading.Thread(target=measure, args=(count,)) for count in (100, 1000, 5000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {count: 3 * 4 * count for count in (100, 1000, 5000)}
    with pytest.raises(OptionsError, match="another measurement is running here"):
        memory.peak(lambda: memory.peak(lambda: None))
    assert memory.peak(lambda: torch.ones(100)).peak_bytes == 400
