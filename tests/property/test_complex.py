"""Complex numbers between layers are differentiated, however a model runs; where they cannot be, that is said."""

from dataclasses import replace

import pytest
import torch

from rpfunc import Batch, Layer, Model, reference, value_and_grad
from rpfunc.errors import ModelError
from rpfunc.objectives import sft
from rpfunc.stream import attend, attending, opaque, recurrent, rowwise
from rpfunc.testing import assert_close
from rpfunc.testing.strategies import every_plan

WIDTH, VOCABULARY, ROWS = 4, 7, 6


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def embed(p, x, batch):
    return p[batch.row["tokens"]]


def to_complex(p, x, batch):
    return torch.view_as_complex((x @ p).unflatten(-1, (-1, 2)))


def to_real(p, x, batch):
    return torch.view_as_real(x * x.conj().exp()).flatten(-2)


def kv(p, x, batch):
    return {"k": x * p[0, 0], "v": x @ p[:2, :2].to(x.dtype)}


def attended(p, x, kv, batch):
    k, v = (torch.view_as_real(kv[name]) for name in "kv")
    return x + torch.view_as_complex(attend(torch.view_as_real(x), k, v).contiguous())


def rotate(p, x, state, batch):
    turned = state[:, None] + (x * torch.polar(torch.ones_like(p[0, 0]), p[0, 0])).cumsum(1)
    return turned, turned[:, -1]


MIXERS = {
    "row-wise": rowwise(lambda p, x, batch: x @ p[:2, :2].to(x.dtype) * 1j),
    "causal": attending(kv, attended),
    "bidirectional": attending(kv, lambda p, x, kv, batch: x + kv["v"].mean(1, keepdim=True).conj(), causal=False),
    "recurrent": recurrent(
        rotate, lambda p, batch: torch.zeros(batch.num_examples, WIDTH // 2, dtype=torch.complex128)
    ),
    "opaque": opaque(lambda p, x, batch: torch.fft.fft(x, dim=1) * p[0, 0]),
}
PARAMS = {"table": draw(VOCABULARY, WIDTH, seed=0)} | {
    name: draw(WIDTH, WIDTH, seed=1 + index) / 2 for index, name in enumerate(("to", "mixer"))
}
TOKENS = torch.arange(3 * ROWS).reshape(3, ROWS) * 5 % VOCABULARY
BATCH = Batch(row={"tokens": TOKENS, "labels": TOKENS})


def model(mixer):
    return Model(
        (
            Layer("embedding", rowwise(embed), "table"),
            Layer("to", rowwise(to_complex), "to"),
            Layer("mixer", MIXERS[mixer], "mixer"),
            Layer("back", rowwise(to_real), ()),
            Layer("head", rowwise(lambda p, x, batch: x @ p.T), "table"),
        )
    )


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize(
    "how", [{}, {"chunk": 1}, {"chunk": 4, "head_chunk": 3}, {"chunk": 2, "order": "chunk"}], ids=str
)
def test_gradients_are_those_of_the_composed_model(mixer, how):
    if how.get("order") == "chunk" and mixer in ("bidirectional", "opaque"):
        pytest.skip("looks ahead")
    loss, wanted = reference.value_and_grad(model(mixer), sft())(PARAMS, BATCH)
    assert all(leaf.norm() > 0.01 for leaf in wanted.values())
    for plan in every_plan(5)[:: 17 if how else 9]:
        result, grads = value_and_grad(model(mixer), sft(), plan=plan, microbatches=2, **how)(PARAMS, BATCH)
        assert_close({"loss": result.loss, **grads}, {"loss": loss, **wanted}, 1e-10)


def test_complex_parameters_are_refused_before_any_work():
    params = {**PARAMS, "to": PARAMS["to"].to(torch.complex128)}
    for function in (value_and_grad(model("row-wise"), sft()), reference.value_and_grad(model("row-wise"), sft())):
        with pytest.raises(ModelError) as caught:
            function(params, BATCH)
        assert str(caught.value) == (
            "model: params leaf to is a torch.complex128 tensor, needs a floating-point tensor; hold "
            "torch.view_as_real of it"
        )


def test_complex_scores_are_refused():
    layers = (*model("row-wise").layers[:-1], Layer("head", rowwise(lambda p, x, batch: x @ p.T), "table"))
    objective = sft()
    twisted = replace(objective, score=lambda logits, batch: objective.score(logits, batch) * 1j)
    with pytest.raises(ModelError, match=r"`score` returned torch\.complex128 .* \(a loss is real: output\.real"):
        value_and_grad(Model(layers), twisted)(PARAMS, BATCH)
