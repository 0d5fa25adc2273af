"""What `attend` refuses, word for word, and the edges that it takes: nothing to attend with, or to."""

import math
from inspect import unwrap  # past the shape checks of tests, that would refuse most of this first

import pytest
import torch
import torch.nn.functional as F

from rpfunc import random
from rpfunc.checks import shown
from rpfunc.errors import ModelError
from rpfunc.stream import attend
from rpfunc.testing import assert_close

EXAMPLES, QUERIES, KEYS, HEADS, KV_HEADS, SIZE = 2, 3, 7, 4, 2, 5


def normal(name, *shape):
    return random.normal(random.key(name), shape, torch.float64)


Q = normal(1, EXAMPLES, QUERIES, HEADS, SIZE)
K, V = normal(2, 2, EXAMPLES, KEYS, KV_HEADS, SIZE)
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2]])
VISIBLE = torch.tensor([[False, False] + [True] * 5] * 2)
OPTIONS = {"query_segments": SEGMENTS[:, -QUERIES:], "key_segments": SEGMENTS, "visible": VISIBLE}


def refused(query=Q, key=K, value=V, **options):
    with pytest.raises(ModelError) as caught:
        unwrap(attend)(query, key, value, **options)
    return str(caught.value).removeprefix("attend: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"query_segments": SEGMENTS, "key_segments": SEGMENTS},
            "query_segments is (2, 7) torch.int64; it must be (batch, queries), here (2, 3), of an integer dtype",
        ),
        *[
            (
                {**OPTIONS, "key_segments": wrong},
                f"key_segments is {tuple(wrong.shape)} {wrong.dtype}; it must be (batch, keys), here (2, 7), of an "
                "integer dtype",
            )
            for wrong in (SEGMENTS[:, :5], SEGMENTS.repeat(1, 2), SEGMENTS[:, :1], SEGMENTS[:1], SEGMENTS.double())
        ],
        *[
            (
                {"visible": wrong},
                f"visible is {tuple(wrong.shape)} {wrong.dtype}; it must be (batch, keys), here (2, 7), of a boolean "
                "dtype",
            )
            for wrong in (
                torch.zeros(2, 7).masked_fill(~VISIBLE, -math.inf),
                VISIBLE.repeat(1, 2),
                VISIBLE[:, :1],
                VISIBLE[:1],
                VISIBLE[0],
                VISIBLE.long(),
            )
        ],
        *[
            (
                {"sinks": wrong},
                f"sinks is {tuple(wrong.shape)} {wrong.dtype}; it must be (query heads), here (4,), of a "
                "floating-point dtype",
            )
            for wrong in (torch.ones(2), torch.ones(3), torch.ones(1), torch.ones(8), torch.ones(1, 4), torch.arange(4))
        ],
        *[
            ({name: wrong}, f"{name} is {shown(wrong)}; it must be a number above 0, and finite (None: the default)")
            for name in ("soft_cap", "scale")
            for wrong in (0.0, -1.0, math.inf, math.nan, "1", True)
        ],
        *[
            (
                {"window": wrong},
                f"window is {wrong} with causal=True; a window is a whole number from 1 and needs causal=True",
            )
            for wrong in (0, -1, 2.5, True)
        ],
        ({"visible": [True]}, "visible is a list; it must be (batch, keys), here (2, 7), of a boolean dtype"),
        ({"key_segments": SEGMENTS}, "query_segments and key_segments must be given together"),
    ],
)
@pytest.mark.parametrize("num_queries", [1, QUERIES])
def test_options(options, message, num_queries):
    if "query_segments" in options and options["query_segments"].shape[1] == QUERIES:
        options = {**options, "query_segments": options["query_segments"][:, :num_queries]}
    assert refused(Q[:, :num_queries], **options) == message.replace("(2, 3)", f"(2, {num_queries})")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((Q, K[..., :3], V), "queries of size 5 and keys of size 3; sizes must be equal and at least 1"),
        ((Q[..., :0], K[..., :0], V), "queries of size 0 and keys of size 0; sizes must be equal and at least 1"),
        ((Q, K[:1], V[:1]), "queries of 2 examples and keys of 1; both must be of the same"),
        ((Q[:, :, :3], K, V), "3 query heads are no multiple of 2 key heads"),
        (
            (Q[:, :, :0], K[:, :, :0], V[:, :, :0]),
            "0 query heads and 0 key heads; both must be at least 1",
        ),
        ((Q, K[:, :2], V[:, :2]), "3 queries cannot be the last rows of 2 keys"),
        ((Q, K, V[:, :6]), "keys (2, 7, 2, 5) and values (2, 6, 2, 5) differ before the last dimension"),
        ((Q.float(), K, V), "queries, keys and values are float32, float64, float64; they must be of one dtype"),
        (
            (Q, K, V.to("meta")),
            "tensors are on several devices: query on cpu, key on cpu, value on meta",
        ),
        (
            (Q[0], K, V),
            "query is (3, 4, 5) torch.float64; it must be (batch, rows, heads, size) of a floating-point dtype",
        ),
        (
            (Q, K.long(), V),
            "key is (2, 7, 2, 5) torch.int64; it must be (batch, rows, heads, size) of a floating-point dtype",
        ),
        (
            (Q, K, V.to(torch.complex128)),
            "value is (2, 7, 2, 5) torch.complex128; it must be (batch, rows, heads, size) of a floating-point dtype",
        ),
    ],
)
def test_tensors(tensors, message):
    assert refused(*tensors) == message


def test_all_at_once():
    assert refused(Q, K[:1], V[..., :2], visible=VISIBLE, window=0, soft_cap=0.0, sinks=torch.ones(2)) == (
        "5 problems"
        "\n  - keys (1, 7, 2, 5) and values (2, 7, 2, 2) differ before the last dimension"
        "\n  - queries of 2 examples and keys of 1; both must be of the same"
        "\n  - window is 0 with causal=True; a window is a whole number from 1 and needs causal=True"
        "\n  - soft_cap is 0.0; it must be a number above 0, and finite (None: the default)"
        "\n  - sinks is (2,) torch.float32; it must be (query heads), here (4,), of a floating-point dtype"
    )


@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 1}, {"window": 2}, {"soft_cap": 2.0}, OPTIONS], ids=str
)
@pytest.mark.parametrize("empty", ["queries", "keys", "queries and keys", "examples", "values"])
def test_nothing_gives_nothing_and_zero_gradients(empty, options):
    parts = [Q, K, V]
    if "queries" in empty:
        parts[0] = Q[:, :0]
    if "keys" in empty:
        parts[1:] = K[:, :0], V[:, :0]
        options = options if "queries" in empty else {**options, "causal": False, "window": None}
    if empty == "examples":
        parts = [part[:0] for part in parts]
    if empty == "values":
        parts[2] = V[..., :0]
    query, key, _ = parts
    cuts = {"query_segments": (query, QUERIES), "key_segments": (key, KEYS), "visible": (key, KEYS)}
    options = dict(options)
    for name, (part, rows) in cuts.items():
        if name in options:
            options[name] = options[name][: part.shape[0], rows - part.shape[1] :]

    def call(*parts):
        return attend(*parts, **options)

    output, pull = torch.func.vjp(call, *parts)
    assert output.shape == (*query.shape[:3], parts[2].shape[-1])
    assert not output.any()
    assert all(grad.shape == part.shape and not grad.any() for grad, part in zip(pull(output), parts, strict=True))


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 4}, {"soft_cap": 2.0}, {"sinks": torch.ones(4)}])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("num_queries", [1, QUERIES, KEYS])
def test_what_is_not_visible_may_hold_anything(garbage, options, num_queries):
    """Keys and values there change no bit of output and gradients, which are zero there."""
    queries = normal(5, EXAMPLES, num_queries, HEADS, SIZE)
    dy, results = normal(6, *queries.shape), []
    for fill in (0.0, garbage):
        leaves = [queries.clone(), *(part.masked_fill(~VISIBLE[..., None, None], fill) for part in (K, V))]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        output = attend(*leaves, visible=VISIBLE, **options)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, dy)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()
    assert not any(grad[~VISIBLE].any() for grad in results[1][2:])


def test_under_autocast_dtypes_may_differ_in_every_chunk():
    q, k, v = Q.float(), K.float(), V.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for num_queries in (1, QUERIES):
            found = attend(q[:, -num_queries:].bfloat16(), k, v)
            wanted = attend(q[:, -num_queries:].double(), k.double(), v.double())
            assert_close(found.double(), wanted, 0.02)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("num_queries", [1, QUERIES, KEYS])
def test_each_example_by_itself_under_vmap(num_queries):
    queries = normal(7, EXAMPLES, num_queries, HEADS, SIZE)
    each = torch.vmap(lambda *parts: attend(*(part[None] for part in parts))[0])
    assert_close(each(queries, K, V), attend(queries, K, V), 1e-12)


def test_padding_that_no_one_sees_needs_no_label():
    """A right-padded batch: garbage keys of the padding leave the rows before as they are without them."""
    visible = torch.tensor([[True] * 5 + [False] * 2] * 2)
    queries = normal(8, EXAMPLES, KEYS, HEADS, SIZE)
    key, value = (F.pad(part[:, :5], (0, 0, 0, 0, 0, 2), value=math.nan) for part in (K, V))
    found = attend(queries, key, value, visible=visible)[:, :5]
    assert_close(found, attend(queries[:, :5], K[:, :5], V[:, :5]), 1e-12)
