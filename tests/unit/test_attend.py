import pytest
import torch
from jaxtyping import TypeCheckError

from rpfunc import random
from rpfunc.stream import attend
from rpfunc.testing import assert_close


def counted(num_queries, num_keys, **options):
    """Queries 0, so that all weights are equal, and value j at key j."""
    query, key = (torch.zeros(1, rows, 1, 2, dtype=torch.float64) for rows in (num_queries, num_keys))
    value = torch.arange(num_keys, dtype=torch.float64).reshape(1, -1, 1, 1).expand(1, -1, 1, 2)
    return attend(query, key, value, **options)[0, :, 0, 0].tolist()


def test_a_later_chunk_of_queries_is_aligned_at_the_bottom_right():
    """Aligned at the top left it would be 0.0 and 0.5; with no mask 3.5 and 3.5."""
    assert counted(2, 8) == pytest.approx([3.0, 3.5])


def test_all_queries_see_themselves_and_what_is_before():
    assert counted(4, 4) == pytest.approx([0.0, 0.5, 1.0, 1.5])


@pytest.mark.parametrize("num_keys", [1, 2, 5])
def test_one_query_sees_every_key(num_keys):
    assert counted(1, num_keys) == pytest.approx([(num_keys - 1) / 2])


def test_without_causality_every_query_sees_every_key():
    assert counted(3, 5, causal=False) == pytest.approx([2.0, 2.0, 2.0])


def test_heads_share_keys_in_contiguous_groups():
    query, key = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 2, 2)
    value = torch.tensor([10.0, 20.0]).reshape(1, 1, 2, 1).expand(1, 1, 2, 2)
    assert attend(query, key, value)[0, 0, :, 0].tolist() == [10.0, 10.0, 20.0, 20.0]


@pytest.mark.parametrize("chunk", range(1, 9))
def test_chunks_of_queries_give_the_outputs_and_gradients_of_all_at_once(chunk):
    query = random.normal(random.key(0), (2, 8, 4, 4), torch.float64)
    key, value = random.normal(random.key(1), (2, 2, 8, 2, 4), torch.float64)
    dy = random.normal(random.key(2), (2, 8, 4, 4), torch.float64)

    def gradients(size):
        leaves = [leaf.clone().requires_grad_() for leaf in (query, key, value)]
        q, k, v = leaves
        spans = [(start, min(start + size, 8)) for start in range(0, 8, size)]
        output = torch.cat([attend(q[:, start:stop], k[:, :stop], v[:, :stop]) for start, stop in spans], dim=1)
        return [output.detach(), *torch.autograd.grad(output, leaves, dy)]

    assert_close(gradients(chunk), gradients(8), 1e-12)


def test_shapes_that_do_not_fit_are_refused_while_tests_run():
    query, key, value = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), torch.zeros(1, 3, 1, 4)
    with pytest.raises(TypeCheckError):
        attend(query, key, value)
