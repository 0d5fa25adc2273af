"""A streaming form gives, any number of rows at a time, what it gives whole."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc import Batch
from rpfunc.stream import attending, opaque, rowwise
from rpfunc.testing import assert_streams, strategies

WIDTH = 2


def integers(generator, *shape):
    return torch.randint(-2, 3, shape, generator=generator).double()


def rows_of_a_tree(params, x, batch):
    """Two leaves mixed, one skip leaf untouched, one integer leaf read and passed on, absolute rows used."""
    place = torch.arange(batch.first_row, batch.first_row + x["ids"].shape[1]).unsqueeze(-1)
    mixed = x["left"] @ params["up"] + x["right"][0].square() * params["scale"] + place
    return {"left": mixed * x["ids"].unsqueeze(-1), "right": (x["left"],), "skip": x["skip"], "ids": x["ids"]}


def shown(params, x, batch):
    """Keys, values, a skip leaf shown as it is, and an integer leaf that masks."""
    return {"key": x["left"] @ params["up"], "value": (x["right"][0] * params["scale"], x["skip"]), "ids": x["ids"]}


def seeing(params, x, kv, batch, causal):
    scores = x["left"] @ kv["key"].mT * (kv["ids"] > 0).unsqueeze(1)
    if causal:
        scores = scores.tril(kv["key"].shape[1] - x["left"].shape[1])
    seen = scores @ kv["value"][0] + x["right"][0]
    first = kv["value"][1].sum(dim=1, keepdim=True) if not causal else 0.0
    return {"left": seen + first, "right": (x["skip"],), "skip": x["left"] * params["scale"], "ids": x["ids"] + 1}


def causal(params, x, kv, batch):
    return seeing(params, x, kv, batch, causal=True)


def bidirectional(params, x, kv, batch):
    return seeing(params, x, kv, batch, causal=False)


FORMS = {
    "rowwise": rowwise(rows_of_a_tree),
    "causal": attending(shown, causal),
    "bidirectional": attending(shown, bidirectional, causal=False),
    "opaque": opaque(rows_of_a_tree),
}


@settings(max_examples=5 * settings.default.max_examples)
@given(st.data())
def test_any_form_over_pytrees_streams_exactly(data):
    form = FORMS[data.draw(st.sampled_from(sorted(FORMS)), "form")]
    num_examples, num_rows = data.draw(st.integers(1, 3), "examples"), data.draw(st.integers(1, 9), "rows")
    seed = data.draw(st.integers(0, 10_000), "seed")
    chunk = data.draw(st.integers(1, num_rows + 5), "chunk")
    generator = torch.Generator().manual_seed(seed)
    shape = (num_examples, num_rows, WIDTH)
    ids = torch.randint(0, 3, shape[:2], generator=generator)
    leaves = [integers(generator, *shape) for _ in range(3)]
    x = {"left": leaves[0], "right": (leaves[1],), "skip": leaves[2], "ids": ids}
    params = {"up": integers(generator, WIDTH, WIDTH), "scale": integers(generator, WIDTH)}
    assert_streams(form, params, x, Batch(row={"ids": ids}), chunk, seed=seed)


@given(num_rows=st.integers(2, 7), chunk=st.integers(1, 6), first_row=st.integers(0, 3))
def test_rows_know_their_absolute_place(num_rows, chunk, first_row):
    seen = []

    def note(params, x, batch):
        seen.append((batch.first_row, batch.num_rows))
        return x * 2

    batch = Batch(row={"x": torch.zeros(1, num_rows)}, first_row=first_row)
    rowwise(note).forward((), torch.zeros(1, num_rows, 1), batch, chunk)
    assert [row for start, count in seen for row in range(start, start + count)] == list(
        range(first_row, first_row + num_rows)
    )
    assert max(count for _, count in seen) <= chunk


@given(num_rows=st.integers(1, 7), chunk=strategies.chunks(7).filter(lambda chunk: chunk is not None))
def test_causal_rows_are_shown_what_stands_before_them_and_no_more(num_rows, chunk):
    shown = []

    def look(params, x, kv, batch):
        shown.append((batch.first_row, batch.num_rows, kv.shape[1]))
        return x + kv[:, -x.shape[1] :]

    form = attending(lambda params, x, batch: x, look)
    form.forward((), torch.zeros(1, num_rows, 1), Batch(row={"x": torch.zeros(1, num_rows)}), chunk)
    assert all(keys == start + count for start, count, keys in shown)


def test_keys_and_values_are_computed_once_a_chunk_in_forward():
    calls = []

    def kv(params, x, batch):
        calls.append(batch.first_row)
        return x

    form = attending(kv, lambda params, x, kv, batch: x)
    form.forward((), torch.zeros(1, 6, 1), Batch(row={"x": torch.zeros(1, 6)}), 2)
    assert calls == [0, 2, 4]
