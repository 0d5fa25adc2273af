"""Sums of gradients, of which some are rows alone, are the sums of the whole tensors that they stand for."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc.sums import Rows, add, whole, whole_sums
from rpfunc.testing import assert_equal

LEAF = torch.zeros(5, 2)


def integers(shape, seed):
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


def dense(sum_):
    """Adds row by row, apart from what is tested."""
    if isinstance(sum_, torch.Tensor):
        return sum_.clone()
    found = torch.zeros(5, 2, dtype=torch.float64)
    for places, values in zip(*sum_, strict=True):
        for place, value in zip(places.tolist(), values, strict=True):
            found[place] = found[place] + value
    return found


PART = st.lists(st.integers(0, 4), min_size=1, max_size=6) | st.none()


@given(st.lists(PART, min_size=1, max_size=5))
def test_sums_of_rows_and_tensors_are_the_sums_of_whole_tensors(parts):
    sums = [
        integers((5, 2), seed) if places is None else Rows((torch.tensor(places),), (integers((len(places), 2), seed),))
        for seed, places in enumerate(parts)
    ]
    wanted = sum(dense(each) for each in sums)
    total, *rest = sums
    for each in rest:
        total = add(total, each)
    assert isinstance(total, Rows) == (None not in parts)
    assert_equal(whole(total, LEAF), wanted)


def test_a_whole_tensor_is_added_to_in_place_from_either_side():
    rows = Rows((torch.tensor([1, 1]),), (torch.ones(2, 2),))
    for order in (lambda a, b: (a, b), lambda a, b: (b, a)):
        tensor = torch.zeros(5, 2)
        assert add(*order(tensor, rows)) is tensor
        assert tensor.sum(1).tolist() == [0, 4, 0, 0, 0]


def test_the_sums_of_a_layer_get_the_shapes_of_its_leaves():
    tensor, rows = torch.ones(3), Rows((torch.tensor([4]),), (torch.ones(1, 2),))
    found = whole_sums((tensor, rows), (torch.zeros(3), LEAF))
    assert found[0] is tensor
    assert found[1].shape == (5, 2)
