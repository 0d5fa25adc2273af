"""Streaming forms that are wrong on purpose: the check that the property tests use must refuse each of them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rpfunc import Batch, random
from rpfunc.stream import attend, attending, rowwise
from rpfunc.testing import assert_streams

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randint(-2, 3, (2, 2, 5, 2), generator=GENERATOR).double()
WEIGHT = torch.tensor([[1.0, -1.0], [2.0, 1.0]], dtype=torch.float64)
BATCH = Batch(row={"x": X[0]}, constant={"key": random.key(0)})


def linear(weight, x, batch):
    return x @ weight


def placed(weight, x, batch):
    return x @ weight * torch.arange(batch.first_row, batch.first_row + x.shape[1]).unsqueeze(-1)


def swap(weight, x, batch):
    return x[1], x[0]


def dropped(weight, x, batch):
    return random.dropout(x @ weight, 0.5, batch.constant["key"], batch)


def seen(weight, x, kv, batch):
    return x + (x @ kv.mT).tril(kv.shape[1] - x.shape[1]) @ kv


def softmaxed(attend):
    def rows(weight, x, kv, batch):
        return attend(x.unsqueeze(2), kv.unsqueeze(2), kv.unsqueeze(2)).squeeze(2)

    return rows


class RowwiseBySteps:
    """`rowwise`, written for these tests in steps that the wrong forms below get wrong."""

    def __init__(self, function):
        self.function = function

    def full(self, weight, x, batch):
        return self.function(weight, x, batch)

    def spans(self, batch, chunk):
        return [(start, min(start + chunk, batch.num_rows)) for start in range(0, batch.num_rows, chunk)]

    def forward(self, weight, x, batch, chunk):
        parts = [self.full(weight, cut(x, *span), batch.rows(*span)) for span in self.spans(batch, chunk)]
        return (
            torch.cat(parts, 1)
            if isinstance(x, torch.Tensor)
            else tuple(torch.cat(leaf, 1) for leaf in zip(*parts, strict=True))
        )

    def backward(self, weight, x, batch, chunk, cotangent, grads):
        dx = tuple(torch.zeros_like(leaf) for leaf in cotangent)
        for start, stop in self.spans(batch, chunk):
            dw, dx_rows = self.pull(weight, cut(x, start, stop), batch.rows(start, stop), cut(cotangent, start, stop))
            grads = self.add(grads, dw)
            dx = self.put(dx, cotangent, dx_rows, start, stop)
        return dx, grads

    def pull(self, weight, x, piece, dy):
        _, pull = torch.func.vjp(lambda weight, x: self.function(weight, x, piece), weight, x)
        dw, dx = pull(dy if isinstance(x, tuple) else dy[0])
        return dw, dx if isinstance(dx, tuple) else (dx,)

    def add(self, grads, dw):
        return (dw,) if grads is None else (grads[0] + dw,)

    def put(self, dx, cotangent, dx_rows, start, stop):
        for place, part in zip(dx, dx_rows, strict=True):
            place[:, start:stop] = part
        return dx


class DropsLastChunk(RowwiseBySteps):
    def backward(self, weight, x, batch, chunk, cotangent, grads):
        stop = self.spans(batch, chunk)[-1][0] or batch.num_rows
        dx, grads = super().backward(weight, x[:, :stop], batch.rows(0, stop), chunk, cut(cotangent, 0, stop), grads)
        return (F.pad(dx[0], (0, 0, 0, batch.num_rows - stop)),), grads


class ForgetsItsPlace(RowwiseBySteps):
    def forward(self, weight, x, batch, chunk):
        pieces = [(cut(x, *span), replace(batch.rows(*span), first_row=0)) for span in self.spans(batch, chunk)]
        return torch.cat([self.full(weight, *piece) for piece in pieces], dim=1)


class ForgetsItsPlaceBackward(RowwiseBySteps):
    def pull(self, weight, x, piece, dy):
        return super().pull(weight, x, replace(piece, first_row=0), dy)


class DrawsAnotherMask(RowwiseBySteps):
    def pull(self, weight, x, piece, dy):
        return super().pull(weight, x, replace(piece, constant={"key": random.key(1)}), dy)


class IgnoresTheSumSoFar(RowwiseBySteps):
    def backward(self, weight, x, batch, chunk, cotangent, grads):
        return super().backward(weight, x, batch, chunk, cotangent, None)


class KeepsTheLastChunkAlone(RowwiseBySteps):
    def add(self, grads, dw):
        return (dw,)


class OverwritesWhatOthersRead(RowwiseBySteps):
    """Writes into the cotangent's memory, of which what the pullback returned may be a view."""

    def put(self, dx, cotangent, dx_rows, start, stop):
        return super().put(cotangent, cotangent, dx_rows, start, stop)


class WritesIntoItsInput(RowwiseBySteps):
    def forward(self, weight, x, batch, chunk):
        output = super().forward(weight, x, batch, chunk)
        x.mul_(2)
        return output


class AttendingBySteps(RowwiseBySteps):
    """Causal `attending` likewise, with `kv` linear."""

    def __init__(self, rows):
        self.rows = rows

    def full(self, weight, x, batch):
        return self.rows(weight, x, linear(weight, x, batch), batch)

    def forward(self, weight, x, batch, chunk):
        kv = linear(weight, x, batch)
        spans = self.spans(batch, chunk)
        return torch.cat([self.rows(weight, cut(x, *span), kv[:, : span[1]], batch.rows(*span)) for span in spans], 1)

    def order(self, spans):
        return spans[::-1]

    def start(self, kv):
        return torch.zeros_like(kv)

    def receive(self, dkv, dseen):
        dkv[:, : dseen.shape[1]] += dseen
        return dkv

    def backward(self, weight, x, batch, chunk, cotangent, grads):
        kv = linear(weight, x, batch)
        dx, dkv = torch.zeros_like(x), self.start(kv)
        for start, stop in self.order(self.spans(batch, chunk)):
            piece, x_rows = batch.rows(start, stop), cut(x, start, stop)
            _, pull = torch.func.vjp(
                lambda w, x, kv, piece=piece: self.rows(w, x, kv, piece), weight, x_rows, kv[:, :stop]
            )
            dw, dx_rows, dseen = pull(cotangent[0][:, start:stop])
            dkv = self.receive(dkv, dseen)
            _, pull = torch.func.vjp(lambda w, x, piece=piece: linear(w, x, piece), weight, x_rows)
            dw_through_kv, dx_through_kv = pull(dkv[:, start:stop])
            grads = self.add(grads, dw + dw_through_kv)
            dx[:, start:stop] = dx_rows + dx_through_kv
        return (dx,), grads


class DropsLaterChunksKeysAndValues(AttendingBySteps):
    def receive(self, dkv, dseen):
        return dseen


class GoesFromFirstToLast(AttendingBySteps):
    def order(self, spans):
        return spans


class KeepsCotangentsOfTheCallBefore(AttendingBySteps):
    kept = None

    def start(self, kv):
        self.kept = super().start(kv) if self.kept is None else self.kept
        return self.kept


def cut(x, start, stop):
    return x[:, start:stop] if isinstance(x, torch.Tensor) else tuple(leaf[:, start:stop] for leaf in x)


def top_left(query, key, value):
    parts = (part.transpose(1, 2) for part in (query, key, value))
    return F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)


def no_mask(query, key, value):
    return attend(query, key, value, causal=False)


WRONG = {
    "a dropped chunk": (DropsLastChunk(linear), X[0]),
    "rows counted from each chunk in forward": (ForgetsItsPlace(placed), X[0]),
    "rows counted from each chunk in backward": (ForgetsItsPlaceBackward(placed), X[0]),
    "another dropout mask in recomputation": (DrawsAnotherMask(dropped), X[0]),
    "gradients not added to the sum": (IgnoresTheSumSoFar(linear), X[0]),
    "gradients of chunks not added up": (KeepsTheLastChunkAlone(linear), X[0]),
    "cotangents overwritten while others read them": (OverwritesWhatOthersRead(swap), (X[0], X[1])),
    "an input that is written to": (WritesIntoItsInput(linear), X[0]),
    "dK and dV of later chunks dropped": (DropsLaterChunksKeysAndValues(seen), X[0]),
    "chunks from first to last": (GoesFromFirstToLast(seen), X[0]),
    "dK and dV not reset between calls": (KeepsCotangentsOfTheCallBefore(seen), X[0]),
    "a mask aligned at the top left": (attending(linear, softmaxed(top_left)), X[0]),
    "no mask": (attending(linear, softmaxed(no_mask)), X[0]),
}
RIGHT = {
    "rowwise": (rowwise(linear), X[0]),
    "rowwise by steps": (RowwiseBySteps(linear), X[0]),
    "placed": (RowwiseBySteps(placed), X[0]),
    "dropped": (RowwiseBySteps(dropped), X[0]),
    "swap": (RowwiseBySteps(swap), (X[0], X[1])),
    "attending": (attending(linear, seen), X[0]),
    "attending by steps": (AttendingBySteps(seen), X[0]),
    "softmaxed": (attending(linear, softmaxed(attend)), X[0]),
}


def check(form, x):
    for chunk in (1, 2, 3, 4):
        assert_streams(form, WEIGHT.clone(), x, BATCH, chunk, tolerance=1e-12)


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_form_is_refused(fault):
    form, x = WRONG[fault]
    with pytest.raises(AssertionError):
        check(form, x.clone() if isinstance(x, torch.Tensor) else x)


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_form_passes_the_same_check(name):
    check(*RIGHT[name])
