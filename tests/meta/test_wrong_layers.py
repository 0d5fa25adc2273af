"""Layers and attentions that are wrong on purpose: `assert_streams` or the dense oracle must refuse each of them."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from oracle.attention_runs import dense, streamed

from rpfunc import Batch, random
from rpfunc.errors import ModelError
from rpfunc.stream import Attending, Recurrent, attend, attending, recurrent, rowwise
from rpfunc.stream.memory import RowMemory, StateMemory
from rpfunc.testing import assert_close, assert_streams

B, T, W = 3, 8, 2
KEY = random.key(0)
X = random.normal(KEY, (B, T, W), torch.float64)
WEIGHT = random.normal(random.key(1), (W, W), torch.float64)
SEGMENTS = torch.arange(T).div(3, rounding_mode="floor").expand(B, T)
BATCH = Batch(row={"x": X}, constant={"key": KEY})
PACKED = Batch(row={"segments": SEGMENTS}, constant={"key": KEY})


def kv(p, x, batch):
    return {"k": (x @ p)[:, :, None], "v": x[:, :, None], **{key: batch.row[key] for key in batch.row if key != "x"}}


def attended(p, x, kv, batch, attend=attend, **options):
    return x + attend(x[:, :, None], kv["k"], kv["v"], **options)[:, :, 0]


def rows_with(attend=attend, **options):
    return lambda p, x, kv, batch: attended(p, x, kv, batch, attend, **options)


def by_segment(p, x, kv, batch):
    return attended(p, x, kv, batch, query_segments=batch.row["segments"], key_segments=kv["segments"])


def top_left(query, key, value):
    parts = (part.transpose(1, 2) for part in (query, key, value))
    return F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)


def nan_rows(query, key, value, *, key_segments, query_segments):
    """Rows do not see themselves, so that the first of a segment sees nothing."""
    place = torch.arange(key.shape[1])
    before = place < place[-query.shape[1] :, None]
    seen = before & (query_segments[:, :, None] == key_segments[:, None])
    scores = torch.einsum("bthd,bshd->bts", query, key).masked_fill(~seen, -torch.inf)
    return torch.einsum("bts,bshd->bthd", torch.softmax(scores, -1), value)


def writing(p, x, kv, batch):
    kv["v"].mul_(0.5)
    return attended(p, x, kv, batch)


def dropping(change):
    def function(p, x, batch):
        return random.dropout(x @ p, 0.5, batch.constant["key"], change(batch))

    return function


class DropsRows(RowMemory):
    """Keys and values get no cotangent from later chunks."""

    def receive_rows(self, index, places, part, start):
        super().receive_rows(index, places, torch.zeros_like(part), start)


class DropsEarlierRows(RowMemory):
    """A chunk gives its own keys and values their cotangent, and those before it none."""

    def receive_rows(self, index, places, part, start):
        kept = torch.arange(places.start, places.stop) + self._first(start) >= start
        super().receive_rows(index, places, part * kept.view(-1, *[1] * (part.dim() - 2)), start)


class LastChunkOnly(RowMemory):
    """The cotangent of the last chunk that read a row replaces those before."""

    chunk = None

    def receive_rows(self, index, places, part, start):
        if start != self.chunk:
            self._cotangents, self.chunk = None, start
        super().receive_rows(index, places, part, start)


class ShiftedRows(RowMemory):
    """The cotangent goes to the rows beside."""

    def receive_rows(self, index, places, part, start):
        super().receive_rows(index, places, part.roll(1, 1), start)


class NoStateCotangent(StateMemory):
    def receive(self, cotangent, start):
        super().receive(tuple(torch.zeros_like(leaf) for leaf in cotangent), start)


class FirstStateAlways(StateMemory):
    def past(self, start):
        return None


@dataclass(frozen=True)
class AttendingIn(Attending):
    remembers: type = RowMemory
    back: int | None = None

    def memory(self):
        return self.remembers(self.back)


@dataclass(frozen=True)
class RecurrentIn(Recurrent):
    remembers: type = StateMemory

    def memory(self):
        return self.remembers()


class LeavesOther(Attending):
    """What a chunk leaves is found in another way in the backward pass."""

    def leave(self, p, x, past, batch):
        return self.kv(p * 1.5, x, batch)


def trained_first(p, x, batch):
    """The keys and values of all chunks but the first are no function of the parameters."""
    return kv(p if batch.first_row == 0 else p.detach(), x, batch)


def init(p, batch):
    return torch.zeros(batch.num_examples, W, dtype=torch.float64)


def sums(p, x, state, batch):
    sums = state[:, None] + torch.tanh(x @ p).cumsum(1)
    return x * sums, sums[:, -1]


def changed_state(change):
    def body(p, x, state, batch):
        y, after = sums(p, x, state, batch)
        return y, change(state, after, x)

    return body


def normalised(p, x, state, batch):
    return sums(p, x - x.mean(1, keepdim=True), state, batch)


WRONG = {
    "a mask aligned at the top left": (attending(kv, rows_with(top_left)), BATCH),
    "no mask": (attending(kv, rows_with(causal=False)), BATCH),
    "a window one row too long": (attending(kv, rows_with(window=4), window=3), BATCH),
    "a window one row too long beside documents": (attending(kv, rows_with(window=3), window=2), BATCH),
    "a declared window that is not masked": (attending(kv, rows_with(), window=3), BATCH),
    "a memory one row too short": (AttendingIn(kv, rows_with(window=3), 3, RowMemory, 2), BATCH),
    "dK and dV of later chunks dropped": (AttendingIn(kv, rows_with(), None, DropsRows), BATCH),
    "dK and dV of earlier rows dropped": (AttendingIn(kv, rows_with(), None, DropsEarlierRows), BATCH),
    "dK and dV of one chunk kept": (AttendingIn(kv, rows_with(), None, LastChunkOnly), BATCH),
    "dK and dV of the rows beside": (AttendingIn(kv, rows_with(), None, ShiftedRows), BATCH),
    "other keys and values in backward": (LeavesOther(kv, rows_with()), BATCH),
    "weights of later keys not trained": (attending(trained_first, rows_with()), BATCH),
    "keys and values written to": (attending(kv, writing), BATCH),
    "keys and values written to, both sides": (attending(kv, writing, causal=False), BATCH),
    "segments ignored": (attending(kv, rows_with()), PACKED),
    "segments of the keys alone": (
        attending(kv, lambda p, x, kv, batch: by_segment(p, x, {**kv, "segments": kv["segments"] * 0 + 1}, batch)),
        PACKED,
    ),
    "a softmax over nothing": (
        attending(
            kv, lambda p, x, kv, batch: attended(
                p, x, kv, batch, nan_rows, query_segments=batch.row["segments"], key_segments=kv["segments"]
            )
        ),
        PACKED,
    ),
    "one dropout mask for every chunk": (rowwise(dropping(lambda batch: replace(batch, first_row=0))), BATCH),
    "one dropout mask for every microbatch": (rowwise(dropping(lambda batch: replace(batch, first_example=0))), BATCH),
    "dropout of its own in kv": (
        attending(lambda p, x, batch: kv(p, F.dropout(x, 0.5), batch), rows_with()),
        BATCH,
    ),
    "a state not handed on": (recurrent(changed_state(lambda state, after, x: state), init), BATCH),
    "the state of the chunk alone": (recurrent(changed_state(lambda state, after, x: after - state), init), BATCH),
    "a state cut from its gradient": (recurrent(changed_state(lambda state, after, x: after.detach()), init), BATCH),
    "a state that counts chunks": (recurrent(changed_state(lambda state, after, x: after + 1), init), BATCH),
    "a state that is read from no chunk": (RecurrentIn(sums, init, FirstStateAlways), BATCH),
    "no cotangent of states": (RecurrentIn(sums, init, NoStateCotangent), BATCH),
    "rows normalised over their run": (recurrent(normalised, init), BATCH),
    "a state handed to the next document": (recurrent(sums, init), PACKED),
}  # fmt: skip
RIGHT = {
    "attending": (attending(kv, rows_with()), BATCH),
    "a window": (attending(kv, rows_with(window=3), window=3), BATCH),
    "a memory of its own": (AttendingIn(kv, rows_with(window=3), 3, RowMemory, 3), BATCH),
    "segments": (attending(kv, by_segment), PACKED),
    "dropout": (rowwise(dropping(lambda batch: batch)), BATCH),
    "a state": (recurrent(sums, init), BATCH),
    "a state in a memory of its own": (RecurrentIn(sums, init), BATCH),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_layer_is_refused(fault):
    form, batch = WRONG[fault]
    # a write in place is refused wherever the layer runs
    with pytest.raises(ModelError if "written to" in fault else AssertionError):
        assert_streams(form, WEIGHT.clone(), X.clone(), batch, draws=6)


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("remembers", [DropsRows, DropsEarlierRows, LastChunkOnly, ShiftedRows])
def test_wrong_cotangents_of_keys_and_values_are_refused_in_every_chunk(remembers, chunk):
    """However they come: from a kernel that has no mask (several rows after others), or from one of a single row."""
    with pytest.raises(AssertionError, match=r"differs from that of torch\.autograd"):
        assert_streams(AttendingIn(kv, rows_with(), None, remembers), WEIGHT, X, BATCH, chunk, tolerance=1e-10)
    with pytest.raises(AssertionError, match=r"differs from that of torch\.autograd"):
        assert_streams(AttendingIn(kv, rows_with(), None, remembers), WEIGHT, X, BATCH, draws=1)


@pytest.mark.parametrize("fault", ["no mask", "segments ignored", "a window one row too long"])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_last_weight_of_zeros_hides_no_row_that_is_seen(fault, zeros):
    form, batch = WRONG[fault]
    out = torch.zeros_like(WEIGHT) if zeros else WEIGHT

    def branch(p, x, kv, batch):
        return x + form.rows(p, x, kv, batch) @ p["out"]

    branched = attending(lambda p, x, batch: form.kv(p["in"], x, batch), branch, window=form.window)
    with pytest.raises(AssertionError, match=r"output row \d depends on input row \d"):
        assert_streams(branched, {"in": WEIGHT, "out": out}, X, batch, draws=1)


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_layer_passes_the_same_check(name):
    form, batch = RIGHT[name]
    assert_streams(form, WEIGHT, X, batch, draws=6)


def with_options(**changes):
    return lambda query, key, value, **options: attend(query, key, value, **{**options, **changes})


def window_off_by(rows):
    def wrong(query, key, value, *, window=None, **options):
        return attend(query, key, value, window=None if window is None else max(1, window + rows), **options)

    return wrong


def interleaved_heads(query, key, value, **options):
    """Query head h reads key head h modulo their number."""
    order = torch.arange(query.shape[2]).reshape(-1, key.shape[2]).T.flatten()
    sinks = options.pop("sinks")
    output = attend(query[:, :, order], key, value, sinks=None if sinks is None else sinks[order], **options)
    return output[:, :, order.argsort()]


def capped_after_the_sink(query, key, value, *, soft_cap, sinks, **options):
    capped = None if sinks is None else soft_cap * torch.tanh(sinks / soft_cap) if soft_cap else sinks
    return attend(query, key, value, soft_cap=soft_cap, sinks=capped, **options)


def own_row_always(query, key, value, *, visible, **options):
    """Padding sees itself."""
    output = attend(query, key, value, visible=visible, **options)
    own = value[:, -query.shape[1] :].repeat_interleave(query.shape[2] // value.shape[2], dim=2)
    nothing = ~visible[:, -query.shape[1] :, None, None] & (output == 0)
    return torch.where(nothing, own, output)


WRONG_ATTENTION = {
    "a window one row too long": window_off_by(1),
    "a window one row too short": window_off_by(-1),
    "no window": with_options(window=None),
    "segments ignored": with_options(query_segments=None, key_segments=None),
    "padding seen": with_options(visible=None),
    "padding that sees itself": own_row_always,
    "sinks ignored": with_options(sinks=None),
    "no soft cap": with_options(soft_cap=None),
    "a cap on sinks too": capped_after_the_sink,
    "another scale": with_options(scale=0.5),
    "heads grouped in turn": interleaved_heads,
    "no gradient of sinks": lambda query, key, value, *, sinks, **options: attend(
        query, key, value, sinks=sinks.detach(), **options
    ),
    "no gradient of earlier keys": lambda query, key, value, **options: attend(
        query, torch.cat((key[:, : -query.shape[1]].detach(), key[:, -query.shape[1] :]), 1), value, **options
    ),
}


def check_attention(attend):
    """One case with all flags, in chunks of 3."""
    shapes = {"q": (2, 8, 4, 2), "k": (2, 8, 2, 2), "v": (2, 8, 2, 2), "sinks": (4,), "dy": (2, 8, 4, 2)}
    tensors = [random.normal(random.fold_in(KEY, name), shape, torch.float64) for name, shape in shapes.items()]
    visible = torch.arange(8) >= torch.tensor([[2], [0]])
    segments = torch.arange(8).div(5, rounding_mode="floor").expand(2, 8)
    options = {"causal": True, "window": 3, "soft_cap": 1.5, "segments": segments, "visible": visible}
    assert_close(streamed(tensors, options, 3, attend), dense(tensors, options), 1e-10)


@pytest.mark.parametrize("fault", WRONG_ATTENTION)
def test_a_wrong_attention_is_refused_by_the_dense_one(fault):
    with pytest.raises(AssertionError):
        check_attention(WRONG_ATTENTION[fault])


def test_the_right_attention_passes_the_same_check():
    check_attention(attend)
