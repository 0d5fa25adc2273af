"""Attention's results, kept between forward and backward: the same bits, one attention less, one activation more."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from rpfunc import Batch, memory, random, tree, value_and_grad
from rpfunc.errors import OptionsError
from rpfunc.models import decoder
from rpfunc.models.decoder import DecoderConfig
from rpfunc.objectives import dpo, sft
from rpfunc.stream import kept_attention

CONFIG = DecoderConfig(vocabulary=40, width=24, layers=3, heads=4, kv_heads=2, head_size=8, mlp_width=40)
MODEL, PARAMS = decoder.model(CONFIG), decoder.init(CONFIG, random.key(0))


def batch(examples, rows, **others):
    tokens = (random.uniform(random.key(1), (examples, rows)) * CONFIG.vocabulary).long()
    return Batch(row={"tokens": tokens, "labels": tokens}, **others)


def run(given, objective=None, **how):
    result, grads = value_and_grad(MODEL, objective or sft(), **how)(PARAMS, given)
    return [result.loss, *tree.leaves(grads)]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def attention_calls(**how):
    """Returns how many times a kernel really computes attention in a run."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run(batch(1, 40), chunk=10, **how)
    counts = {event.key: event.count for event in profiler.key_averages()}
    return counts["aten::_scaled_dot_product_flash_attention_for_cpu"]


@given(
    rows=st.integers(2, 24),
    chunk=st.integers(1, 24),
    keep=st.floats(0, 1),
    examples=st.integers(1, 3),
    plan=st.sampled_from([None, "F0:2 X2:5 B0:2", "F0:1 F1:3 X3:5 B1:3 B0:1"]),
)
def test_no_bit_depends_on_what_is_kept(rows, chunk, keep, examples, plan):
    given, how = batch(examples, rows), {"chunk": chunk, "head_chunk": 3, "microbatches": examples}
    assert equal(run(given, **how, plan=plan, keep_attention=keep), run(given, **how))


def test_an_objective_that_is_not_linear_has_the_same_bits():
    pairs = batch(2, 20, example={"reference_logprobs": torch.zeros(2)}, group_size=2)
    assert equal(run(pairs, dpo(), chunk=6, keep_attention=0.6), run(pairs, dpo(), chunk=6))


def test_residuals_kept_across_tasks_have_the_same_bits():
    how = {"chunk": 5, "plan": "F0:2 X2:5 B0:2", "recompute": False}
    assert equal(run(batch(1, 20), **how, keep_attention=1), run(batch(1, 20), chunk=5))


def test_attention_is_computed_once_for_every_chunk_that_is_kept():
    # 3 of 4 chunks see earlier rows: two kernel calls each, for those rows and for their own; of two layers, since the
    # last one goes with the head, and is computed once in any case
    counts = [attention_calls(keep_attention=keep) for keep in (0, 0.2, 0.25, 0.5, 0.75, 1)]
    assert [counts[0] - count for count in counts] == [0, 0, 4, 8, 12, 12]


def test_what_is_kept_costs_its_share_of_an_activation_in_each_layer():
    given = batch(1, 2000)

    def peak(keep):
        function = value_and_grad(MODEL, sft(), chunk=100, head_chunk=50, keep_attention=keep)
        return memory.peak(lambda: function(PARAMS, given)).peak_bytes

    activation, layers = 2000 * CONFIG.heads * CONFIG.head_size * 4, 2
    for keep in (0.5, 1.0):
        assert 0 <= peak(keep) - peak(0) <= 1.2 * keep * layers * activation


def test_another_chunks_result_would_be_found_out(monkeypatch):
    right = run(batch(1, 20), chunk=5)

    class GivesAnothers(kept_attention.KeptAttention):
        def recomputing(self, start):
            return super().recomputing(15 if start == 5 else 5 if start == 15 else start)

    monkeypatch.setattr(sys.modules["rpfunc.stream.linearize"], "KeptAttention", GivesAnothers)
    assert not equal(run(batch(1, 20), chunk=5, keep_attention=1), right)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"keep_attention": -1, "chunk": 5}, "keep_attention is -1, it must be a share of the rows, 0 to 1"),
        ({"keep_attention": 2, "chunk": 5}, "keep_attention is 2"),
        ({"keep_attention": float("nan"), "chunk": 5}, "keep_attention is nan"),
        ({"keep_attention": "all", "chunk": 5}, "keep_attention is 'all'"),
        ({"keep_attention": 1}, "keep_attention is for layers that are recomputed: it needs a chunk and order='layer'"),
        ({"keep_attention": 1, "chunk": 5, "order": "chunk"}, "it needs a chunk and order='layer'"),
    ],
)
def test_what_cannot_be_kept_is_refused(how, words):
    with pytest.raises(OptionsError, match=words):
        run(batch(1, 10), **how)
