"""Measured and predicted peaks agree, and budgets are kept."""

import pytest
import torch

from rpfunc import Batch, Layer, Model, memory, plan, random, tree, value_and_grad
from rpfunc.errors import PlanError
from rpfunc.models import decoder
from rpfunc.models.decoder import DecoderConfig
from rpfunc.objectives import dpo, sft
from rpfunc.stream import rowwise
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
    {"chunk": 50, "head_chunk": 50, "keep_attention": 1},
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
