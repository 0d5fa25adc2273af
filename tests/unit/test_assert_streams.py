"""`assert_streams` takes layers that can be cut, and says of others what they read, where, and what to do."""

import pytest
import torch
import torch.nn.functional as F

from rpfunc import Batch, Layer, random
from rpfunc.errors import OptionsError
from rpfunc.models import decoder
from rpfunc.stream import attend, attending, opaque, recurrent, rowwise
from rpfunc.testing import assert_streams

B, T, W = 2, 6, 2
X = random.normal(random.key(0), (B, T, W), torch.float64)
IDS = torch.tensor([[0, 1, 2, 0, 1, 2], [2, 1, 0, 1, 2, 0]])
PLAIN = Batch(row={"ids": IDS}, constant={"key": random.key(1)})
PACKED = Batch(row={"ids": IDS, "segments": torch.tensor([[4, 4, 4, 7, 7, 7], [1, 2, 2, 2, 3, 3]])})
WEIGHT = random.normal(random.key(2), (W, W), torch.float64)


def heads(x):
    return x.unsqueeze(2)


def kv(p, x, batch):
    return {"k": x @ p, "v": x, **{name: leaf for name, leaf in batch.row.items() if name == "segments"}}


def attention(declared=None, **options):
    """Rows that attend as `options` has it, whatever window is declared."""

    def rows(p, x, kv, batch):
        ids = {"query_segments": batch.row["segments"], "key_segments": kv["segments"]} if "segments" in kv else {}
        return attend(heads(x), heads(kv["k"]), heads(kv["v"]), **{**ids, **options}).squeeze(2)

    return attending(kv, rows, window=declared)


def states(body):
    return recurrent(body, lambda p, batch: torch.zeros(batch.num_examples, W, dtype=torch.float64))


def running_sum(p, x, state, batch):
    sums = state[:, None] + (x @ p).cumsum(1)
    return sums, sums[:, -1]


def refuse(form, *, x=X, batch=PLAIN, params=WEIGHT, error=AssertionError, **options):
    with pytest.raises(error) as caught:
        assert_streams(form, params, x, batch, **options)
    return str(caught.value)


RIGHT = {
    "row-wise": (rowwise(lambda p, x, batch: torch.tanh(x @ p)), PLAIN),
    "causal": (attention(), PLAIN),
    "window": (attention(3, window=3), PLAIN),
    "documents": (attention(), PACKED),
    "bidirectional": (attending(kv, lambda p, x, kv, batch: x + kv["k"].mean(1, keepdim=True), causal=False), PLAIN),
    "recurrent": (states(running_sum), PLAIN),
    "opaque": (opaque(lambda p, x, batch: x.cumsum(1) + x.mean(1, keepdim=True)), PLAIN),
    "embedding": (rowwise(lambda p, x, batch: F.embedding(batch.row["ids"], torch.cat((p, p)))), PLAIN),
    "dropout": (rowwise(lambda p, x, batch: random.dropout(x @ p, 0.5, batch.constant["key"], batch)), PLAIN),
    "integers": (rowwise(lambda p, x, batch: (batch.row["ids"] + 1, x)), PLAIN),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layers_that_can_be_cut_pass(name, dtype):
    form, batch = RIGHT[name]
    assert_streams(form, WEIGHT.to(dtype), X.to(dtype), batch, draws=6)


def test_layers_of_a_model_pass_by_name():
    config = decoder.DecoderConfig(vocabulary=5, width=4, layers=1, heads=2, kv_heads=1, head_size=2, mlp_width=4)
    params = decoder.init(config, random.key(0))
    batch = Batch(row={"tokens": IDS})
    x = ()
    for layer in decoder.model(config).layers:
        assert_streams(layer, params, x, batch, draws=4)
        x = layer(params, x, batch)


LATER = (
    "causal layer: output row 0 depends on input row 1 (x), which it may not see: it comes later; `rows` must mask it, "
    "as rpfunc.stream.attend does"
)
FORBIDDEN = {
    "all kv that is given": (attending(kv, lambda p, x, kv, batch: x + kv["v"].sum(1, keepdim=True)), PLAIN, LATER),
    "no mask": (attention(causal=False), PLAIN, LATER),
    "a row too early": (
        attention(3, window=4),
        PLAIN,
        "causal layer with window 3: output row 3 depends on input row 0 (x), which it may not see: a window of 3 "
        "shows row 3 rows 1 to 3; `rows` must mask it, as rpfunc.stream.attend does",
    ),
    "another document": (
        attention(query_segments=None, key_segments=None),
        PACKED,
        "causal layer: output row 3 depends on input row 0 (x), which it may not see: batch.row['segments'] has 7 at "
        "row 3 and 4 at row 0",
    ),
    "a state of another document": (
        states(running_sum),
        PACKED,
        "recurrent layer: output row 3 depends on input row 0 (x), which it may not see: batch.row['segments'] has 7 "
        "at row 3 and 4 at row 0",
    ),
    "the run's last row": (
        states(lambda p, x, state, batch: (x + x[:, -1:], state)),
        PLAIN,
        "recurrent layer: output row 0 depends on input row 5 (x), which it may not see: it comes later; `body` must "
        "not look ahead in its run of rows",
    ),
    "the row before": (
        rowwise(lambda p, x, batch: x + F.pad(x, (0, 0, 1, 0))[:, :-1]),
        PLAIN,
        "row-wise layer: output row 1 depends on input row 0 (x), which it may not see: a row of a row-wise layer sees "
        "itself alone",
    ),
    "ids of the row after": (
        rowwise(lambda p, x, batch: x + batch.row["ids"].roll(-1, 1)[..., None]),
        PLAIN,
        "row-wise layer: output row 0 depends on input row 1 (batch.row), which it may not see: a row of a row-wise "
        "layer sees itself alone",
    ),
    "the mean over examples": (
        rowwise(lambda p, x, batch: x - x.mean(0)),
        PLAIN,
        "row-wise layer: output row 0 of example 0 depends on input row 0 of example 1 (x), which it may not see: "
        "examples never see each other, since a batch is cut between them",
    ),
    "examples, where rows are free": (
        opaque(lambda p, x, batch: x - x.mean(0)),
        PLAIN,
        "opaque layer: output of example 0 depends on input of example 1 (x), which it may not see: examples never see "
        "each other, since a batch is cut between them",
    ),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_first_forbidden_row_is_named(name):
    form, batch, message = FORBIDDEN[name]
    assert refuse(form, batch=batch) == message


def test_a_row_seen_in_chunks_alone_is_named_too():
    def rows(p, x, kv, batch):
        whole = kv["k"].shape[1] == x.shape[1] == T
        return attend(heads(x), heads(kv["k"]), heads(kv["v"]), causal=whole).squeeze(2)

    assert refuse(attending(kv, rows)) == LATER.replace("causal layer", "causal layer, 2 rows at a time")


def test_a_layer_may_be_told_to_see_other_documents():
    assert_streams(attention(query_segments=None, key_segments=None), WEIGHT, X, PACKED, segments=None, draws=4)


LONG = Batch(
    row={
        "ids": torch.arange(2 * 40).reshape(2, 40) % 3,
        "segments": torch.tensor([[0] * 9 + [1] * 11 + [2] * 20, [5] * 9 + [6] * 31]),
    }
)
LONG_X = random.normal(random.key(3), (2, 40, W), torch.float64)


@pytest.mark.parametrize(("row", "seen"), [(9, 0), (20, 19), (39, 9), (31, 0)])
@pytest.mark.parametrize("example", [0, 1])
def test_a_single_pair_of_rows_of_two_documents_is_found_wherever_it_is(row, seen, example):
    def rows(p, x, kv, batch):
        out = attend(
            heads(x), heads(kv["k"]), heads(kv["v"]), query_segments=batch.row["segments"], key_segments=kv["segments"]
        ).squeeze(2)
        places = torch.arange(batch.first_row, batch.first_row + x.shape[1])
        examples = torch.arange(batch.first_example, batch.first_example + x.shape[0])
        here = (places == row) & (examples == example)[:, None]
        return out + here[..., None] * kv["v"][:, min(seen, kv["v"].shape[1] - 1), None]

    ids = LONG.row["segments"][example]
    allowed = ids[row] == ids[seen]
    if allowed:
        assert_streams(attending(kv, rows), WEIGHT, LONG_X, LONG, draws=2)
    else:
        assert refuse(attending(kv, rows), x=LONG_X, batch=LONG) == (
            f"causal layer: output row {row} depends on input row {seen} (x), which it may not see: "
            f"batch.row['segments'] has {ids[row]} at row {row} and {ids[seen]} at row {seen}"
        )


def test_another_document_seen_through_ids_alone_is_found():
    def rows(p, x, kv, batch):
        out = attend(
            heads(x), heads(kv["k"]), heads(kv["v"]), query_segments=batch.row["segments"], key_segments=kv["segments"]
        ).squeeze(2)
        late = torch.arange(batch.first_row, batch.first_row + x.shape[1]) >= 20
        return out + late[:, None] * kv["ids"][:, 19:20, None].to(x.dtype) if kv["ids"].shape[1] > 19 else out

    def with_ids(p, x, batch):
        return {**kv(p, x, batch), "ids": batch.row["ids"]}

    assert "output row 20 depends on input row 19 (batch.row)" in refuse(
        attending(with_ids, rows), x=LONG_X, batch=LONG
    )


def test_a_leaf_of_segments_that_is_not_there_is_refused():
    message = refuse(attention(), batch=PACKED, segments="misspelt", error=OptionsError)
    assert message == (
        "assert_streams of causal layer: segments is 'misspelt', which batch.row lacks; it has ['ids', 'segments'] "
        "(None: each example is one document)"
    )


def test_complex_numbers_between_layers_have_gradients_too():
    turn = rowwise(lambda p, x, batch: x * torch.polar(torch.ones_like(p[0]), p[0]))
    assert_streams(turn, WEIGHT, torch.complex(X, X.flip(1)), PLAIN, draws=4)
    assert_streams(states(lambda p, x, s, batch: ((x.conj() @ p.to(x.dtype)).real, s)), WEIGHT, X + 0j, PLAIN, draws=4)

    def conjugated(p, x, batch):
        return x.conj() if x.shape[1] < T else x

    assert "differs from that of" in refuse(rowwise(conjugated), x=torch.complex(X, X.flip(1)))


PLACES = "places and draws come from batch.first_example and batch.first_row"
DRAW = "draw with rpfunc.random from a key in batch.constant"
IMPURE = {
    "writes into x": (lambda p, x, batch: x.mul_(2), "argument x was written to"),
    "writes into parameters": (lambda p, x, batch: x @ p.add_(1), "argument params was written to"),
    "writes into the batch": (lambda p, x, batch: x + batch.row["ids"].sub_(0).add_(1)[..., None], "batch.row.ids was"),
    "global dropout": (lambda p, x, batch: F.dropout(x, 0.5), f"draws from torch's global random state, .*; {DRAW}"),
    "a call counter": (
        lambda p, x, batch, calls=[]: (calls.append(1), x * len(calls))[1],
        "two calls with the same arguments differ at output row 0, so something else is read, .* has left behind; "
        f"{DRAW}",
    ),
    "a softmax over nothing": (
        lambda p, x, batch: x + torch.softmax(torch.full_like(x, -torch.inf), -1),
        r"output, whole rows, is nan at \[0, 0, 0\]; a softmax over nothing does that: .*zeros",
    ),
    "a gradient that is not finite": (
        lambda p, x, batch: torch.where(x > 9, (x - x).sqrt(), x @ p),
        r"gradient of x, whole rows, is nan at \[0, 0, 0\]",
    ),
}


@pytest.mark.parametrize("name", IMPURE)
def test_what_no_pure_layer_does_is_named(name):
    function, message = IMPURE[name]
    fresh = Batch(row={"ids": IDS.clone()}, constant=PLAIN.constant)
    with pytest.raises(AssertionError, match=f"^row-wise layer: .*{message}"):
        assert_streams(rowwise(function), WEIGHT.clone(), X.clone(), fresh)


def half_stopped(p, x, kv, batch):
    shown = kv["v"] if kv["v"].shape == x.shape else kv["v"].detach()
    return x + shown.cumsum(1)[:, -x.shape[1] :]


CUTS = {
    "how much kv there is": (
        attending(kv, lambda p, x, kv, batch: x * kv["k"].shape[1]),
        "causal layer, layer by layer, 2 rows at a time: output row 0 of example 0 differs from that of whole rows "
        r"\(relative error 0.\d+ of at most 1e-10\); `rows` must not depend on how many kv rows it is given, and its "
        f"own are the last of them; {PLACES}",
    ),
    "rows counted from the chunk's first": (
        rowwise(lambda p, x, batch: x + torch.arange(x.shape[1])[:, None]),
        f"row-wise layer, layer by layer, 2 rows at a time: output row 2 of example 0 .*; {PLACES}",
    ),
    "a state not handed on": (
        states(lambda p, x, state, batch: ((x @ p).cumsum(1), state)),
        "recurrent layer, layer by layer, 2 rows at a time: output row 2 of example 0 .*; `body` must give for rows "
        f"cut in two what it gives for them together, by its state alone; {PLACES}",
    ),
    "examples counted from the piece's first": (
        rowwise(lambda p, x, batch: x + torch.arange(x.shape[0])[:, None, None]),
        f"row-wise layer, whole rows, 2 microbatches: output row 0 of example 1 .*; {PLACES}",
    ),
    "a gradient stopped in what rows show": (
        attending(kv, half_stopped),
        r"causal layer, layer by layer, 2 rows at a time: the gradient of x differs from that of torch.autograd \(",
    ),
    "a weight not trained in chunks": (
        rowwise(lambda p, x, batch: x @ (p["w"] if x.shape[1] == T else p["w"].detach()) + p["b"]),
        r"row-wise layer, layer by layer, 2 rows at a time: the gradient of params \(w\) differs from that of torch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_where_a_cut_changes_something_is_named(name):
    form, message = CUTS[name]
    params = {"w": WEIGHT, "b": WEIGHT[0]} if "weight" in name else WEIGHT
    with pytest.raises(AssertionError, match=f"^{message}"):
        assert_streams(form, params, X, PLAIN)


def test_an_error_raised_in_a_chunk_says_which():
    form = attending(
        kv, lambda p, x, kv, batch: (x @ kv["k"].mT).masked_fill(torch.ones(T, T).triu(1) > 0, 0) @ kv["v"]
    )
    with pytest.raises(RuntimeError) as caught:
        assert_streams(form, WEIGHT, X, PLAIN)
    assert caught.value.__notes__ == ["raised by causal layer, 2 rows at a time"]


def test_a_layer_is_called_by_its_name():
    assert refuse(Layer("mixer", FORBIDDEN["the row before"][0], "w"), params={"w": WEIGHT}).startswith(
        "layer 'mixer': output row 1 depends on input row 0 (x), which it may not see"
    )


def test_examples_of_one_group_may_see_each_other():
    pairs = Batch(row={"ids": IDS.repeat(2, 1)}, group_size=2)
    mixing = opaque(
        lambda p, x, batch: x - x.unflatten(0, (-1, 2)).mean(1, keepdim=True).expand(-1, 2, -1, -1).flatten(0, 1)
    )
    assert_streams(mixing, WEIGHT, X.repeat(2, 1, 1), pairs, draws=4)  # fmt: skip


@pytest.mark.parametrize(
    ("form", "batch", "x", "message"),
    [
        (attention(), Batch(row={"ids": IDS[:1]}), X[:1], "batch has 1 examples, 2 or more show if they mix"),
        (attention(7, window=7), PLAIN, X, "batch has 6 rows, 8 or more show what the form promises"),
        (
            attention(),
            Batch(row={"segments": torch.zeros(B, T, dtype=torch.long)}),
            X,
            "batch.row['segments'] has one segment in each of the first 2 examples, two show if they mix",
        ),
    ],
)
def test_a_batch_that_cannot_show_a_fault_is_refused(form, batch, x, message):
    kind = "causal layer with window 7" if "8" in message else "causal layer"
    assert refuse(form, x=x, batch=batch, error=OptionsError) == f"assert_streams of {kind}: {message}"


def test_all_that_a_batch_lacks_is_listed():
    message = refuse(attention(), x=X[:1, :2], batch=PLAIN.examples(0, 1).rows(0, 2), error=OptionsError)
    assert message == (
        "assert_streams of causal layer: 2 problems\n"
        "  - batch has 1 examples, 2 or more show if they mix\n"
        "  - batch has 2 rows, 3 or more show what the form promises"
    )


def test_the_same_seed_draws_the_same_cuts_with_one_row_and_one_example_among_them():
    def cuts(seed):
        seen = []

        def note(p, x, batch):
            seen.append((*x.shape[:2], batch.first_example, batch.first_row))
            return x

        assert_streams(rowwise(note), WEIGHT, X, PLAIN, seed=seed)
        return seen

    assert cuts(1) == cuts(1) != cuts(2)
    assert {(B, 1, 0, 0), (1, T, 0, 0)} <= set(cuts(3))
