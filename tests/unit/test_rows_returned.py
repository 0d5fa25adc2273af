"""Layers and objectives that return another number of rows are refused wherever rows are cut, not spread out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rpfunc import Batch, Layer, Model, apply, value, value_and_grad
from rpfunc.errors import ModelError
from rpfunc.objectives import Objective, sft, weighted_mean
from rpfunc.stream import attend, attending, recurrent, rowwise
from rpfunc.testing import assert_streams_objective

TOKENS = torch.randint(7, (2, 9), generator=torch.Generator().manual_seed(0))
BATCH = Batch(row={"tokens": TOKENS, "labels": TOKENS})
TABLE = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

WAYS = {
    "layer by layer": {"chunk": 3},
    "chunks as they come": {"chunk": 4},
    "one chunk": {"chunk": 9},
    "chunk by chunk": {"chunk": 3, "order": "chunk"},
    "on workers": {"chunk": 3, "workers": 2, "plan": "F0:2 X2:4 B0:1 B1:2"},
    "recomputed layer by layer": {"chunk": 3, "recompute": "layer", "plan": "F0:2 X2:4 B0:2"},
}

CHANGES = {
    "one row": lambda x: x[:, :1],
    "one row less": lambda x: x[:, 1:],
    "a row more": lambda x: torch.cat((x, x[:, :1]), dim=1),
    "no dimension of rows": lambda x: x.sum(dim=(1, 2)),
    "a number": lambda x: 1.0,
    "an array": lambda x: np.ones(tuple(x.shape)),
    "a leaf in a dict": lambda x: {"rows": x, "mean": x.mean(dim=1)},
}


def look(p, x, kv, batch):
    return x + attend(x[:, :, None], kv, kv)[:, :, 0]


FORMS = {
    "row-wise": lambda change: rowwise(lambda p, x, batch: change(x)),
    "causal": lambda change: attending(
        lambda p, x, batch: x[:, :, None], lambda p, x, kv, batch: change(look(p, x, kv, batch))
    ),
    "bidirectional": lambda change: attending(
        lambda p, x, batch: x, lambda p, x, kv, batch: change(x + kv.mean(dim=1, keepdim=True)), causal=False
    ),
    "recurrent": lambda change: recurrent(
        lambda p, x, state, batch: (change(state[:, None] + x.cumsum(dim=1)), state + x.sum(dim=1)),
        lambda p, batch: torch.zeros(batch.num_examples, 4, dtype=torch.float64),
    ),
    "causal, of keys": lambda change: attending(
        lambda p, x, batch: change(x), lambda p, x, kv, batch: x, window=None
    ),
    "bidirectional, of keys": lambda change: attending(
        lambda p, x, batch: change(x), lambda p, x, kv, batch: x, causal=False
    ),
}  # fmt: skip


RUNS = [(form, way) for form in FORMS for way in WAYS if (form[0], way) != ("b", "chunk by chunk")]
"""Bidirectional rows look ahead, and are refused chunk by chunk before they run."""


def model(middle):
    embedding = rowwise(lambda p, x, batch: p[batch.row["tokens"]])
    add = rowwise(lambda p, x, batch: (x["rows"] if isinstance(x, dict) else x) + p[batch.row["tokens"]])
    head = rowwise(lambda p, x, batch: x @ p.T)
    layers = [Layer("embedding", embedding, "table"), Layer("middle", middle)]
    return Model((*layers, Layer("add", add, "table"), Layer("head", head, "table")))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("form", "way"), RUNS)
def test_a_layer_that_returns_no_row_for_each_row_is_named(form, change, way):
    middle = FORMS[form](CHANGES[change])
    with pytest.raises(ModelError, match=r"layer: of \d rows, leaf \S+ of what its function returned is") as error:
        value_and_grad(model(middle), sft(), **WAYS[way])({"table": TABLE}, BATCH)
    assert any("in layer 'middle'" in note for note in error.value.__notes__)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", FORMS)
def test_so_it_is_where_a_value_alone_is_asked_for(form, change):
    with pytest.raises(ModelError, match=r"layer: of \d rows, leaf \S+ of what its function returned is"):
        value(model(FORMS[form](CHANGES[change])), sft(), chunk=3)({"table": TABLE}, BATCH)


@pytest.mark.parametrize(("form", "way"), RUNS)
def test_the_right_layer_passes_and_gives_what_whole_rows_give(form, way):
    right = model(FORMS[form](lambda x: x))
    found, grads = value_and_grad(right, sft(), **WAYS[way])({"table": TABLE}, BATCH)
    wanted, wanted_grads = value_and_grad(right, sft())({"table": TABLE}, BATCH)
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(grads["table"], wanted_grads["table"])


def shifted_in_the_score(output, batch):
    """The usual line of torch, which cuts a row off: of a chunk, it cuts off one in each."""
    return F.cross_entropy(output[:, :-1].transpose(1, 2), batch.row["labels"][:, 1:], reduction="none")


def summed_in_the_score(output, batch):
    return output.logsumexp(dim=2).sum(dim=1, keepdim=True)


def own(score):
    return Objective(
        "own", lambda b: b, lambda b: torch.tensor(16.0), score, lambda s, b, total: weighted_mean(s, total)
    )


@pytest.mark.parametrize("how", [*WAYS.values(), {"head_chunk": 4}], ids=str)
@pytest.mark.parametrize("score", [shifted_in_the_score, summed_in_the_score], ids=lambda score: score.__name__)
def test_a_score_of_other_rows_is_named_where_rows_are_cut(score, how):
    sound = model(rowwise(lambda p, x, batch: x))
    with pytest.raises(ModelError, match=r"objective 'own': its `score` returned \d rows for \d; where rows are cut"):
        value_and_grad(sound, own(score), **how)({"table": TABLE}, BATCH)
    how = {name: option for name, option in how.items() if name in ("chunk", "head_chunk")}
    with pytest.raises(ModelError, match=r"objective 'own': its `score` returned \d rows for \d; where rows are cut"):
        value(sound, own(score), **how)({"table": TABLE}, BATCH)


@pytest.mark.parametrize("score", [shifted_in_the_score, summed_in_the_score], ids=lambda score: score.__name__)
def test_the_check_of_objectives_says_so_too(score):
    objective = replace(own(score), prepare=sft().prepare, total=sft().total)

    def make_batch(groups, rows, seed):
        return Batch(row={"labels": torch.randint(7, (groups, rows), generator=torch.Generator().manual_seed(seed))})

    with pytest.raises(AssertionError, match=r"`score` returns \d rows for \d"):
        assert_streams_objective(objective, make_batch, 7)


def test_a_recurrent_body_returns_rows_and_state_or_is_refused_by_name():
    """A tensor alone would be taken apart by its examples, and the first be broadcast over all."""
    batch = Batch(row={"x": torch.ones(2, 3, 1)})
    for body, what in [
        (lambda p, x, state, batch: batch.row["x"] * p, "a Tensor"),
        (lambda p, x, state, batch: None, "a NoneType"),
        (lambda p, x, state, batch: (batch.row["x"] * p, state, state), "3 values"),
    ]:
        form = recurrent(body, lambda p, batch: torch.zeros(batch.num_examples, 1))
        for chunk in (None, 2):
            model = Model((Layer("leaky", form, "w"),))
            with pytest.raises(ModelError, match=rf"^recurrent: `body` returned {what}, needs two") as caught:
                apply(model, chunk=chunk)({"w": torch.ones(1)}, batch)
            assert any("layer 'leaky'" in note for note in caught.value.__notes__)
