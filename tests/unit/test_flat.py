"""Who owns which memory: the rules that make overwriting cotangents safe."""

import torch

from rpfunc.stream.flat import accumulate, floating, overwrite, own, spans, vjp, write


def same_memory(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_own_copies_what_is_shared_expanded_or_foreign_and_nothing_else():
    lone, foreign = torch.ones(2, 3), torch.ones(3)
    owned = own((lone, lone, foreign, torch.ones(1).expand(4), torch.ones(2, 3).mT), foreign=(foreign,))
    assert owned[0] is lone
    storages = [leaf.untyped_storage().data_ptr() for leaf in (*owned, foreign)]
    assert len(set(storages)) == len(storages)
    assert all(leaf.is_contiguous() for leaf in owned)


def test_two_slices_of_one_storage_are_not_both_owned():
    whole = torch.ones(4, 2)
    first, second = own((whole[:2], whole[2:]))
    assert not same_memory(first, second)


def test_accumulate_takes_over_its_first_contribution_and_adds_in_place():
    part = torch.ones(2)
    total = accumulate(None, (part,))
    assert total[0] is part
    assert accumulate(total, (torch.ones(2),))[0] is part
    assert part.tolist() == [2.0, 2.0]


def test_sums_of_16_bit_contributions_are_32_bit():
    total = accumulate(None, (torch.ones(1, dtype=torch.bfloat16),))
    for _ in range(256):
        total = accumulate(total, (torch.full((1,), 0.001, dtype=torch.bfloat16),))
    assert total[0].dtype == torch.float32
    assert abs(total[0].item() - 1.256) < 1e-3


def test_floating_leaves_are_replaced_and_others_stay():
    ids = torch.arange(2)
    flat, rebuild = floating({"x": torch.ones(2), "ids": ids})
    assert len(flat) == 1
    rebuilt = rebuild((torch.zeros(2),))
    assert rebuilt["ids"] is ids
    assert rebuilt["x"].tolist() == [0.0, 0.0]


def test_vjp_gives_one_flat_cotangent_for_each_argument():
    output, pull = vjp(
        lambda a, b: a["x"] * b[0] + b[1], {"x": torch.tensor(2.0)}, (torch.tensor(3.0), torch.tensor(1.0))
    )
    assert output == 7.0
    assert pull((torch.tensor(1.0),)) == ((3.0,), (2.0, 1.0))


def test_vjp_of_nothing_to_differentiate_is_the_value():
    output, pull = vjp(lambda ids: ids + 1, torch.arange(2))
    assert output.tolist() == [1, 2]
    assert pull(()) == ((),)


def test_spans_cover_all_rows_once():
    for num_rows in range(1, 8):
        for chunk in range(1, 10):
            covered = [row for start, stop in spans(num_rows, chunk) for row in range(start, stop)]
            assert covered == list(range(num_rows))


def test_writing_all_rows_at_once_copies_nothing():
    part = torch.ones(1, 3)
    assert write(None, part, 0, 3, 3) is part


def test_an_input_gradient_of_the_cotangents_kind_lives_in_its_memory():
    cotangent = (torch.ones(1, 4, 2),)
    dx = overwrite(None, cotangent, (torch.zeros(1, 2, 2),), 0, 2, 4)
    assert dx[0] is cotangent[0]
    assert dx[0][0, :, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_an_input_gradient_of_another_kind_gets_memory_of_its_own():
    for other in (torch.zeros(1, 2, 3), torch.zeros(1, 2, 2, dtype=torch.float64)):
        cotangent = (torch.ones(1, 4, 2),)
        dx = overwrite(None, cotangent, (other,), 2, 4, 4)
        assert not same_memory(dx[0], cotangent[0])
        assert torch.equal(cotangent[0], torch.ones(1, 4, 2))
        assert dx[0].shape == (1, 4, other.shape[-1])
