"""Draws follow the exact probabilities, and cuts keep exactly what their definitions say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from rpfunc import random
from rpfunc.sampling import Sampler

NUM_DRAWS = 20_000
LOGITS = [2.0, -1.0, 0.5, 0.5, -3.0, 1.0, -torch.inf, 0.0]


def choose(sampler, logits, num=1, first=0):
    rows = torch.tensor(logits, dtype=torch.float64).expand(num, -1)
    return sampler.choose(rows, torch.arange(first, first + num), torch.zeros(num, dtype=torch.long))


def kept_probabilities(logits, temperature=1.0, top_k=None, top_p=None):
    """The oracle, in plain Python: the exact distribution after temperature, top-k and then top-p."""
    from math import exp, inf

    largest = max(logits)
    weights = {
        token: exp((logit - largest) / temperature) if logit > -inf else 0.0 for token, logit in enumerate(logits)
    }
    order = sorted(weights, key=lambda token: (-logits[token], token))[: top_k or len(logits)]
    total = sum(weights[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        if top_p is None or reached < top_p * total:
            kept.append(token)
        reached += weights[token]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 4.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.8},
    ],
    ids=str,
)
def test_frequencies_are_the_exact_probabilities(options):
    probabilities = kept_probabilities(LOGITS, **options)
    for seed in range(3):
        counts = (
            choose(Sampler(random.key(seed), **options), LOGITS, NUM_DRAWS).bincount(minlength=len(LOGITS)).tolist()
        )
        assert all(count == 0 for count, p in zip(counts, probabilities, strict=True) if p == 0.0)
        seen = [(count, p * NUM_DRAWS) for count, p in zip(counts, probabilities, strict=True) if p > 0.0]
        assert chisquare(*zip(*seen, strict=True)).pvalue > 1e-3


def test_the_comparison_would_see_a_wrong_temperature():
    counts = choose(Sampler(random.key(0), temperature=1.1), LOGITS, NUM_DRAWS).bincount(minlength=len(LOGITS)).tolist()
    seen = [(count, p * NUM_DRAWS) for count, p in zip(counts, kept_probabilities(LOGITS), strict=True) if p > 0.0]
    assert chisquare(*zip(*seen, strict=True)).pvalue < 1e-6


@given(
    logits=st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=6),
    top_k=st.none() | st.integers(1, 7),
    top_p=st.none() | st.sampled_from([1e-6, 0.3, 0.5, 0.9, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_only_kept_tokens_are_drawn_and_all_likely_ones_are(logits, top_k, top_p, temperature):
    probabilities = kept_probabilities(logits, temperature, top_k, top_p)
    drawn = set(choose(Sampler(random.key(0), temperature, top_k, top_p), logits, 2000).tolist())
    assert drawn <= {token for token, p in enumerate(probabilities) if p > 0.0}
    assert drawn >= {token for token, p in enumerate(probabilities) if p > 0.02}


def test_draws_of_examples_and_places_are_independent_and_repeat():
    sampler, zeros = Sampler(random.key(7)), torch.zeros(100, 4)
    examples, places = torch.arange(100), torch.arange(100)
    columns = [
        sampler.choose(zeros, examples, torch.full_like(places, 3)),
        sampler.choose(zeros, torch.full_like(examples, 3), places),
        Sampler(random.key(8)).choose(zeros, examples, torch.full_like(places, 3)),
    ]
    assert torch.equal(columns[0], sampler.choose(zeros, examples, torch.full_like(places, 3)))
    for index, one in enumerate(columns):
        assert one.bincount(minlength=4).min() > 10
        for other in columns[index + 1 :]:
            assert 10 < (one == other).sum() < 45


@pytest.mark.parametrize("temperature", [1e-300, 1e-3])
def test_a_tiny_temperature_is_the_likeliest_without_overflow(temperature):
    assert choose(Sampler(random.key(0), temperature), [1e4, -1e4, 9e3], 100).unique().tolist() == [0]


def test_a_large_vocabulary_in_float32_is_drawn_evenly():
    logits = torch.zeros(4000, 1000)
    chosen = Sampler(random.key(0)).choose(logits, torch.arange(4000), torch.zeros(4000, dtype=torch.long))
    assert chisquare((chosen // 50).bincount(minlength=20).tolist()).pvalue > 1e-3
