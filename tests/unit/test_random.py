import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, random
from rpfunc.errors import OptionsError

MANY = 20_000


def test_uniform_has_the_moments_of_the_unit_interval():
    draws = random.uniform(random.key(0), (MANY,), torch.float64)
    assert abs(draws.mean() - 1 / 2) < 4 * math.sqrt(1 / 12 / MANY)
    assert abs(draws.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / MANY)


def test_normal_has_mean_0_variance_1_and_no_skew():
    draws = random.normal(random.key(0), (MANY,), torch.float64)
    assert abs(draws.mean()) < 4 / math.sqrt(MANY)
    assert abs(draws.var() - 1) < 4 * math.sqrt(2 / MANY)
    assert abs((draws**3).mean()) < 4 * math.sqrt(15 / MANY)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_never_reaches_1(dtype):
    draws = random.uniform(random.key(0), (MANY,), dtype)
    assert draws.dtype == dtype
    assert draws.min() >= 0
    assert draws.max() < 1


@pytest.mark.parametrize("bit", [0, 1, 31, 62, 63])
def test_every_bit_is_fair(bit):
    ones = (random.bits(random.key(1), torch.arange(MANY)) >> bit) & 1
    assert abs(ones.double().mean() - 0.5) < 4 * 0.5 / math.sqrt(MANY)


def test_neighbouring_places_and_keys_are_uncorrelated():
    first, second = (random.uniform(random.key(seed), (MANY,), torch.float64) - 0.5 for seed in (0, 1))
    limit = 4 / 12 / math.sqrt(MANY)
    assert abs((first * second).mean()) < limit
    assert abs((first[1:] * first[:-1]).mean()) < limit


def test_thousands_of_derived_keys_and_draws_never_collide():
    root = random.key(0)
    keys = {random.fold_in(root, index) for index in range(3000)}
    keys |= {random.fold_in(root, f"block{index}") for index in range(3000)}
    keys |= {random.key(seed) for seed in range(-1500, 1500)}
    assert len(keys) == 9000
    draws = random.bits(root, torch.arange(100).unsqueeze(1), torch.arange(100))
    assert draws.unique().numel() == 10_000


@given(st.integers(-(2**70), 2**70))
def test_a_key_is_64_bits_of_any_seed(seed):
    assert 0 <= random.key(seed).value < 2**64


@given(st.integers(0, 1000), st.integers(1, 5))
def test_split_gives_different_keys_the_same_each_time(seed, num):
    keys = random.split(random.key(seed), num)
    assert len({random.key(seed), *keys}) == num + 1
    assert keys == random.split(random.key(seed), num)


def test_folding_in_order_matters():
    root = random.key(0)
    assert random.fold_in(random.fold_in(root, 1), 2) != random.fold_in(random.fold_in(root, 2), 1)


@pytest.mark.parametrize("number", [0, -3, 2**70, np.int64(3), np.uint8(3)])
def test_any_whole_number_is_a_seed_and_folds_in(number):
    assert random.key(number) == random.key(int(number))
    assert random.fold_in(random.key(0), number) == random.fold_in(random.key(0), int(number))


@pytest.mark.parametrize("number", [True, 2.0, None, [1], torch.tensor(1)])
def test_what_is_no_whole_number_is_no_seed(number):
    with pytest.raises(OptionsError, match=r"^key: seed is .*, it must be a whole number$"):
        random.key(number)
    with pytest.raises(OptionsError, match=r"^fold_in: data is .*, it must be a whole number or a text$"):
        random.fold_in(random.key(0), number)


@pytest.mark.parametrize("bits", [0, 1, -1, -2, 2**63 - 1, -(2**63), 1 << 11, -(1 << 11)])
def test_the_extremes_of_the_bits_give_finite_numbers(monkeypatch, bits):
    monkeypatch.setattr(random, "bits", lambda key, *indices: torch.full_like(indices[0], bits))
    assert random.normal(random.key(0), (3,), torch.float64).isfinite().all()
    assert random.categorical(random.key(0), torch.tensor([[-torch.inf, 0.0]])).tolist() == [1]


def test_bits_are_fixed_for_ever():
    """A checkpoint resumes with the same draws under any later version."""
    assert random.key(0).value == 0
    assert random.key(1).value == 0x5692161D100B05E5
    assert random.bits(random.key(1), torch.arange(2)).tolist() == [5199774590669546748, 4158004636484536377]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_zeroes_its_share_and_keeps_the_mean(rate):
    x = torch.ones(4, 5, 1000)
    dropped = random.dropout(x, rate, random.key(0), Batch(row={"x": x}))
    assert abs((dropped == 0).double().mean() - rate) < 0.02
    assert dropped[dropped != 0].unique().tolist() == pytest.approx([1 / (1 - rate)])


def test_dropout_of_rate_0_is_the_identity():
    x = torch.ones(1, 1, 1)
    assert random.dropout(x, 0.0, random.key(0), Batch(row={"x": x})) is x


def test_each_example_row_and_feature_has_a_mask_of_its_own():
    x = torch.ones(8, 8, 64)
    kept = random.dropout(x, 0.5, random.key(0), Batch(row={"x": x})) != 0
    for dimension in range(3):
        slices = {tuple(part.flatten().tolist()) for part in kept.unbind(dimension)}
        assert len(slices) == kept.shape[dimension]


def test_categorical_follows_the_probabilities():
    probabilities = torch.tensor([0.1, 0.2, 0.7])
    drawn = random.categorical(random.key(0), probabilities.log().expand(MANY, 3))
    shares = torch.bincount(drawn, minlength=3) / MANY
    assert torch.allclose(shares, probabilities, atol=0.02)


def test_draws_leave_torchs_own_generator_alone():
    state = torch.get_rng_state()
    random.normal(random.key(0), (3,))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draw", [random.uniform, random.normal])
def test_blocks_of_draws_are_the_draws(draw):
    """Whatever the block, number i is drawn from the bits of place i."""
    num = 2 * random.BLOCK + 3
    whole = draw(random.key(5), (num,), torch.float64)
    centred = (random.bits(random.key(5), torch.arange(num)) >> 11 & (1 << 53) - 1).double() * 2.0**-53
    wanted = centred if draw is random.uniform else torch.special.ndtri(centred + 2.0**-54)
    assert torch.equal(whole, wanted)
    assert draw(random.key(5), (0, 4)).shape == (0, 4)
