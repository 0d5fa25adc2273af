import pytest
import torch

from rpfunc import Batch
from rpfunc.errors import BatchError


def full(num_examples=6, num_rows=4, group_size=2):
    return Batch(
        row={"tokens": torch.arange(num_examples * num_rows).reshape(num_examples, num_rows)},
        example={"weight": torch.arange(num_examples)},
        group={"margin": torch.arange(num_examples // group_size)},
        constant={"beta": 0.5, "table": torch.arange(3)},
        group_size=group_size,
    )


def test_rows_cut_row_leaves_alone():
    piece = full().rows(1, 3)
    assert piece.row["tokens"].tolist() == [[1, 2], [5, 6], [9, 10], [13, 14], [17, 18], [21, 22]]
    assert piece.example["weight"].tolist() == [0, 1, 2, 3, 4, 5]
    assert piece.group["margin"].tolist() == [0, 1, 2]
    assert piece.constant["table"].tolist() == [0, 1, 2]


def test_examples_cut_everything_but_constants():
    piece = full().examples(2, 6)
    assert piece.row["tokens"][:, 0].tolist() == [8, 12, 16, 20]
    assert piece.example["weight"].tolist() == [2, 3, 4, 5]
    assert piece.group["margin"].tolist() == [1, 2]
    assert piece.constant["table"].tolist() == [0, 1, 2]


def test_pieces_of_pieces_know_their_absolute_place():
    piece = full().examples(2, 6).rows(1, 4).examples(2, 4).rows(2, 3)
    assert (piece.first_example, piece.first_row) == (4, 3)
    assert piece.row["tokens"].tolist() == [[19], [23]]


def test_pieces_share_memory_where_they_are_contiguous():
    batch = full()

    def shares(piece, whole):
        return piece.row["tokens"].untyped_storage().data_ptr() == whole.row["tokens"].untyped_storage().data_ptr()

    assert shares(batch.examples(2, 4), batch)
    assert shares(batch.examples(0, 2).rows(0, 4), batch)
    one = Batch(row={"tokens": torch.arange(6).reshape(1, 6)})
    assert shares(one.rows(2, 4), one)
    assert not shares(batch.rows(1, 3), batch)
    assert batch.rows(1, 3).row["tokens"].is_contiguous()


@pytest.mark.parametrize(
    ("num_examples", "num", "sizes"),
    [
        (1, 1, [1]), (2, 1, [2]), (5, 3, [2, 2, 1]), (5, 4, [2, 1, 1, 1]), (10, 3, [4, 3, 3]), (10, 4, [3, 3, 2, 2]),
        (2, 4, [1, 1]), (3, 3, [1, 1, 1]), (9, 8, [2, 1, 1, 1, 1, 1, 1, 1]), (7, 5, [2, 2, 1, 1, 1]),
    ],
)  # fmt: skip
def test_microbatches_differ_by_one_at_most_larger_first(num_examples, num, sizes):
    pieces = Batch(row={"x": torch.zeros(num_examples, 1)}).microbatches(num)
    assert [piece.num_examples for piece in pieces] == sizes


@pytest.mark.parametrize("num", range(1, 9))
@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_microbatches_are_the_batch_in_order_and_cut_no_group(group_size, num):
    batch = full(num_examples=12, group_size=group_size)
    pieces = batch.microbatches(num)
    assert torch.cat([piece.row["tokens"] for piece in pieces]).equal(batch.row["tokens"])
    assert torch.cat([piece.group["margin"] for piece in pieces]).equal(batch.group["margin"])
    assert all(piece.num_examples % group_size == 0 for piece in pieces)
    assert len(pieces) == min(num, 12 // group_size)
    sizes = [piece.num_examples // group_size for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


def test_sizes_come_from_whatever_leaf_there_is():
    assert Batch(example={"a": torch.zeros(3)}).num_examples == 3
    assert Batch(group={"a": torch.zeros(3)}, group_size=2).num_examples == 6
    assert full().num_rows == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Batch(row={"a": torch.zeros(2, 3), "b": torch.zeros(3, 4)}),
            "batch: 2 problems\n"
            "  - leaves disagree on the number of examples B: {'row.a': 2, 'row.b': 3}\n"
            "  - row leaves disagree on the number of rows T: {'row.a': 3, 'row.b': 4}",
        ),
        (
            lambda: Batch(example={"a": torch.zeros(4)}, group={"m": torch.zeros(3)}, group_size=2),
            "batch: leaves disagree on the number of examples B: {'example.a': 4, 'group.m': 6}",
        ),
        (
            lambda: Batch(row={"a": torch.zeros(3)}, example={"b": torch.zeros(())}),
            "batch: 2 problems\n  - row.a needs dimensions (B, T, ...)\n  - example.b needs dimensions (B, ...)",
        ),
        (
            lambda: Batch(row={"a": torch.zeros(3, 1)}, group_size=2),
            "batch: 3 examples are no multiple of group_size 2",
        ),
        (lambda: Batch(group_size=0), "batch: group_size is 0, it must be at least 1"),
        (lambda: full().examples(1, 4), "batch: examples 1 to 4 cut a group of 2 examples"),
        (lambda: full().microbatches(0), "batch: cannot cut 3 groups into 0 microbatches, both must be at least 1"),
        (
            lambda: Batch(row={"a": torch.zeros(0, 2)}).microbatches(2),
            "batch: cannot cut 0 groups into 2 microbatches, both must be at least 1",
        ),
        (
            lambda: Batch().num_examples,
            "batch: has no row, example or group leaf, so its number of examples is unknown",
        ),
        (
            lambda: Batch(example={"a": torch.zeros(2)}).num_rows,
            "batch: has no row leaf, so its number of rows is unknown",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(BatchError) as caught:
        make()
    assert str(caught.value) == message
