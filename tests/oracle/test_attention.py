"""`attend`, whole and in chunks of an attending layer, against attention written densely, values and gradients."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import dense_attention
from oracle.attention_runs import NAMES, dense, streamed

from rpfunc import memory, random
from rpfunc.stream import attend, attention
from rpfunc.stream.attention import BLOCK
from rpfunc.testing import assert_close, gradient_error

FLAGS = ("sinks", "window", "soft cap", "segments", "left padding", "right padding")


@st.composite
def cases(draw, every_query_sees=False):
    """(q, k, v, sinks or None, dy), options of the oracle: any shape, any flags, none of them often; float64."""
    num_rows, num_examples = draw(st.integers(1, 9), "rows"), draw(st.integers(1, 2), "examples")
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (2, 2)]), "heads")
    size, value_size = draw(st.sampled_from([(2, 2), (4, 3)]), "sizes")
    flags = draw(st.just(set()) | st.sets(st.sampled_from(FLAGS)), "flags")
    causal = "window" in flags or draw(st.booleans(), "causal")
    key = random.key(draw(st.integers(0, 9999), "seed"))
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size)]
    q, k, v = (normal(key, name, num_examples, num_rows, *shape) for name, shape in zip("qkv", shapes, strict=True))
    borders = random.uniform(random.fold_in(key, "segments"), (num_examples, num_rows)) < 0.3
    kept = (random.uniform(random.fold_in(key, "kept"), (num_examples, 1)) * (num_rows + 1)).long()
    visible = torch.arange(num_rows) < kept
    padding = None if every_query_sees else next((flag for flag in sorted(flags) if "padding" in flag), None)
    options = {
        "causal": causal,
        "window": draw(st.integers(1, num_rows + 2), "window") if "window" in flags else None,
        "soft_cap": 1.5 if "soft cap" in flags else None,
        "segments": borders.cumsum(1) if "segments" in flags else None,
        "visible": {None: None, "left padding": visible.flip(1), "right padding": visible}[padding],
    }
    sinks = normal(key, "sinks", heads) if "sinks" in flags else None
    return (q, k, v, sinks, normal(key, "dy", num_examples, num_rows, heads, value_size)), options


def normal(key, name, *shape):
    return random.normal(random.fold_in(key, name), shape, torch.float64)


@given(case=cases(), chunk=st.integers(1, 14), block=st.sampled_from([1, 2, 3, BLOCK]))
def test_any_flags_chunks_and_blocks_give_dense_attention_in_float64(case, chunk, block):
    with patch.object(attention, "BLOCK", block):
        assert_close(streamed(*case, chunk), dense(*case), 1e-10)


@given(case=cases(), chunk=st.integers(1, 14))
def test_any_flags_and_chunks_are_within_1e_5_in_float32(case, chunk):
    tensors, options = case
    found = streamed([leaf if leaf is None else leaf.float() for leaf in tensors], options, chunk)
    assert found["output"].dtype == torch.float32
    rounded = [leaf if leaf is None else leaf.float().double() for leaf in tensors]
    assert_close(found, dense(rounded, options), 1e-5)


@pytest.mark.parametrize("kind", ["plain", "all flags"])
def test_bfloat16_errs_at_most_twice_as_much_as_plain_torch(kind):
    """Over the whole of some draws: the error of a single small one is luck."""
    shapes = {"q": (2, 12, 4, 4), "k": (2, 12, 2, 4), "v": (2, 12, 2, 4), "sinks": (4,), "dy": (2, 12, 4, 4)}
    options = {"causal": True, "window": None, "soft_cap": None, "segments": None, "visible": None}
    if kind == "all flags":
        segments = torch.arange(12).div(7, rounding_mode="floor").expand(2, 12)
        options |= {"window": 5, "soft_cap": 2.0, "segments": segments}
    errors = {"found": [], "plain": []}
    for seed in range(6):
        low = [normal(random.key(seed), name, *shape).bfloat16() for name, shape in shapes.items()]
        low[3] = low[3] if kind == "all flags" else None
        exact = dense([leaf if leaf is None else leaf.double() for leaf in low], options)
        plain = dense(low, options, attend=dense_attention.plain)
        for name, run in (("found", streamed(low, options, 1 + seed)), ("plain", plain)):
            errors[name].append([gradient_error({part: run[part]}, {part: exact[part]}) for part in exact])
    found, plain = (torch.tensor(errors[name]).mean(dim=0) for name in ("found", "plain"))
    assert (found <= 2 * plain).all(), f"output, {', '.join(NAMES)}: {found.tolist()} against {plain.tolist()}"


@given(case=cases(every_query_sees=True))
def test_the_dense_formula_equals_a_softmax_over_minus_infinity(case):
    tensors, options = case
    assert_close(dense(tensors, options, attend=dense_attention.plain), dense(tensors, options), 1e-12)


def counted(chunk=None, num_rows=6, **options):
    """Queries 0, so that all weights are equal, and value j at row j; in one piece or by chunks of a layer."""
    zeros = torch.zeros(1, num_rows, 1, 1, dtype=torch.float64)
    values = torch.arange(num_rows, dtype=torch.float64).reshape(1, -1, 1, 1)
    if chunk is None:
        return attend(zeros, zeros, values, **options).flatten().tolist()
    options = {"causal": True, "window": None, "soft_cap": None, "segments": None, "visible": None, **options}
    return streamed((zeros, zeros, values, None, zeros), options, chunk)["output"].flatten().tolist()


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 6, 8])
def test_the_last_rows_see_all_before_them(chunk):
    assert counted(chunk, num_rows=8)[6:] == pytest.approx([3.0, 3.5])


@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 4, 6])
def test_a_window_counts_the_row_itself(chunk):
    assert counted(chunk, window=3) == pytest.approx([0, 0.5, 1, 2, 3, 4])


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("window", [6, 7, 100, None])
def test_a_window_as_long_as_the_rows_or_none_is_plain_causality(window, chunk):
    assert counted(chunk, window=window) == counted(chunk) == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("chunk", range(1, 11))
def test_grouped_heads_collect_keys_and_values_from_all_later_chunks(chunk, window, dtype, tolerance):
    key = random.key(chunk)
    names = ("q", "k", "v", "dy")
    tensors = [normal(key, name, 2, 8, 4 if name in ("q", "dy") else 2, 4).to(dtype) for name in names]
    tensors.insert(3, None)
    options = {"causal": True, "window": window, "soft_cap": None, "segments": None, "visible": None}
    wanted = dense([leaf if leaf is None else leaf.double() for leaf in tensors], options)
    assert_close(streamed(tensors, options, chunk), wanted, tolerance)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 5, 10])
def test_padding_on_the_left_changes_nothing_of_what_follows(chunk, sinks):
    """Row 1 has three pads: as if it stood alone with two rows. Queries of the pads see nothing: all is finite."""
    pads, key = 3, random.key(4)
    q, k, v, dy = (normal(key, name, 2, 5, 2, 4) for name in ("q", "k", "v", "dy"))
    dy[1, :pads] = 0
    sink = normal(key, "sinks", 2) if sinks else None
    visible = torch.ones(2, 5, dtype=torch.bool)
    visible[1, :pads] = False
    options = {"causal": True, "window": None, "soft_cap": None, "segments": None, "visible": visible}
    found = streamed((q, k, v, sink, dy), options, 5 if chunk is None else chunk)
    unpadded = {**options, "visible": None}
    first = streamed([leaf if leaf is None or leaf is sink else leaf[:1] for leaf in (q, k, v, sink, dy)], unpadded, 5)
    last = [leaf if leaf is None or leaf is sink else leaf[1:, pads:] for leaf in (q, k, v, sink, dy)]
    second = streamed(last, unpadded, 5)
    for name in found:
        assert found[name].isfinite().all()
        if name == "sinks":
            assert_close(found[name], first[name] + second[name], 1e-12)
            continue
        assert_close(found[name][:1], first[name], 1e-12)
        assert_close(found[name][1:, pads:], second[name], 1e-12)
        assert not found[name][1, :pads].any()


@pytest.mark.parametrize("kind", ["plain", "window", "sinks"])
@pytest.mark.parametrize(("num_queries", "num_rows"), [(1100, 1100), (300, 2400), (1100, 2200)])
def test_more_rows_than_a_block_equal_dense_attention(num_queries, num_rows, kind):
    """As many queries as rows, or those of a last chunk."""
    window = 7
    q, k, v, dy = (normal(random.key(5), name, 1, num_rows, 1, 2) for name in ("q", "k", "v", "dy"))
    q, dy = q[:, -num_queries:], dy[:, -num_queries:]
    sinks = normal(random.key(6), "sinks", 1) if kind == "sinks" else None
    found, wanted = {}, {}
    for results, run in ((found, attend), (wanted, banded)):
        leaves = [leaf.clone().requires_grad_() for leaf in (q, k, v)]
        results["output"] = run(*leaves, window=window if kind != "plain" else None, sinks=sinks)
        results["dq"], results["dk"], results["dv"] = torch.autograd.grad(results["output"], leaves, dy)
        results["output"] = results["output"].detach()
    assert_close(found, wanted, 1e-10)


def banded(query, key, value, *, window, sinks):
    """Dense attention of the last rows over one whole mask, without a loop over rows."""
    row = torch.arange(key.shape[1])
    distance = row[-query.shape[1] :, None] - row
    seen = (distance >= 0) & (distance < (len(row) if window is None else window))
    weights = ((query[0, :, 0] @ key[0, :, 0].T) / query.shape[-1] ** 0.5).exp() * seen
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp())
    return (weights / total @ value[0, :, 0])[None, :, None]


@pytest.mark.parametrize("value_size", [1, 3])
@pytest.mark.parametrize("num_queries", [1, 2 * BLOCK, 4 * BLOCK])
def test_values_of_another_size_make_no_scores_of_all_queries_and_keys(num_queries, value_size):
    num_keys = 4 * BLOCK
    q, k = (normal(random.key(5), name, 1, num, 1, 2) for name, num in (("q", num_queries), ("k", num_keys)))
    v = normal(random.key(5), "v", 1, num_keys, 1, value_size)
    with torch.no_grad():
        found = memory.peak(lambda: attend(q, k, v))
    assert found.result.shape == (1, num_queries, 1, value_size)
    assert_close(found.result, banded(q, k, v, window=None, sinks=None), 1e-10)
    assert found.peak_bytes < 8 * BLOCK * (2 * BLOCK)


@pytest.mark.parametrize("kind", ["window", "segments", "sinks", "visible"])
def test_no_mask_of_all_queries_and_keys_is_ever_made(kind):
    num_rows = 4 * BLOCK
    q = normal(random.key(5), "q", 1, num_rows, 1, 2)
    options = {"window": {"window": 7}, "sinks": {"window": 7, "sinks": torch.zeros(1, dtype=torch.float64)}}.get(kind)
    if kind == "segments":
        segments = torch.arange(num_rows).div(100, rounding_mode="floor")[None]
        options = {"query_segments": segments, "key_segments": segments, "window": 7}
    if kind == "visible":
        options = {"visible": torch.ones(1, num_rows, dtype=torch.bool), "window": 7}
    with torch.no_grad():
        found = memory.peak(lambda: attend(q, q, q, **options))
    assert found.peak_bytes < num_rows * num_rows * 8 / 2  # of float64 scores there would be this much
    # what a block of queries needs: scores, weights and mask over the keys of the block and of its window
    assert found.peak_bytes < 8 * BLOCK * (BLOCK + 7) * 8
