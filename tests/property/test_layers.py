"""Whole layers of every kind have one gradient: that of plain autograd, however rows and examples are cut."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import dense_attention

from rpfunc import Batch, Layer, Model, random, reference, tree, value_and_grad
from rpfunc.errors import ModelError
from rpfunc.objectives import Objective, sft
from rpfunc.stream import attend, attending, recurrent, rowwise
from rpfunc.testing import assert_close, assert_equal, assert_streams, gradient_error, strategies

V, W, H = 7, 4, 2
TOTAL = Objective(
    "total",
    prepare=lambda batch: batch,
    total=lambda batch: torch.ones((), dtype=torch.float64),
    score=lambda output, batch: (output * batch.row["dy"]).sum(-1),
    loss=lambda sums, batch, total: sums.sum() / total,
)


def draw(name, *shape, dtype=torch.float64):
    return random.normal(random.fold_in(random.key(3), name), shape, dtype) / 2


def packed(examples, rows, seed, length=4, pads=3):
    """Documents of `length` rows and `pads` rows of padding, at the left of one example and the right of the next."""
    key = random.key(seed)
    row = torch.arange(rows)
    segments = (row.expand(examples, rows) + torch.arange(examples)[:, None]).div(length, rounding_mode="floor")
    kept = torch.stack([row >= pads if index % 2 else row < rows - pads for index in range(examples)])
    x, dy = (random.normal(random.fold_in(key, name), (examples, rows, W), torch.float64) for name in ("x", "dy"))
    return Batch(row={"x": x, "dy": dy, "segments": segments, "visible": kept}, constant={"key": key})


def attention(*, causal=True, window=None, documents=False, padding=False, dropout=0.0):
    """Grouped heads, sinks, and all that a batch may forbid; what a row shows carries its segment and visibility."""

    def drop(x, place, batch):
        return random.dropout(x, dropout, random.fold_in(batch.constant["key"], place), batch) if dropout else x

    def kv(p, x, batch):
        shown = {"k": (x @ p["k"]).unflatten(-1, (1, W)), "v": drop(x @ p["v"], "kv", batch).unflatten(-1, (1, W))}
        return shown | {name: batch.row[name] for name in ("segments", "visible")}

    def rows(p, x, kv, batch):
        attended = attend(
            (x @ p["q"]).unflatten(-1, (H, W)),
            kv["k"],
            kv["v"],
            causal=causal,
            window=window,
            query_segments=batch.row["segments"] if documents else None,
            key_segments=kv["segments"] if documents else None,
            visible=kv["visible"] if padding else None,
            sinks=p["sinks"],
        )
        return x + drop(attended.flatten(2) @ p["o"], "rows", batch)

    return attending(kv, rows, causal=causal, window=window)


def attention_params():
    shapes = {"k": (W, W), "v": (W, W), "q": (W, H * W), "o": (H * W, W), "sinks": (H,)}
    return {name: draw(name, *shape) for name, shape in shapes.items()}


def dense_layer(p, batch, **options):
    """`attention` on dense formulas."""
    x = batch.row["x"]
    query, shown = (x @ p["q"]).unflatten(-1, (H, W)), [(x @ p[name]).unflatten(-1, (1, W)) for name in ("k", "v")]
    attended = dense_attention.attend(
        query, *shown, segments=batch.row["segments"], visible=batch.row["visible"], sinks=p["sinks"], **options
    )
    return x + attended.flatten(2) @ p["o"]


def autograd(function, params, batch):
    """Gradient of Σ dy · function(params) by torch.autograd."""
    leaves, structure = tree.flatten(params)
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    total = (function(tree.unflatten(structure, leaves)) * batch.row["dy"]).sum()
    return tree.unflatten(structure, torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True))


def only(form):
    """A model of one layer over the row leaf x."""
    first = Layer("x", rowwise(lambda p, x, batch: batch.row["x"]))
    return Model((first, Layer("layer", form, "layer"), Layer("last", rowwise(lambda p, x, batch: x))))


HOWS = st.fixed_dictionaries(
    {
        "chunk": st.integers(1, 14),
        "microbatches": st.integers(1, 3),
        "workers": st.sampled_from([None, 2]),
        "plan": strategies.plans(3),
    }
)


@given(seed=st.integers(0, 99), rows=st.integers(1, 11), side=st.sampled_from(["one", "both"]), how=HOWS)
def test_window_documents_padding_and_sinks_in_one_layer_have_the_dense_gradient(seed, rows, side, how):
    batch, params = packed(3, rows, seed), attention_params()
    sight = {"causal": True, "window": 3} if side == "one" else {"causal": False}
    model = only(attention(**sight, documents=True, padding=True))
    wanted = autograd(lambda p: dense_layer(p, batch, **sight), params, batch)
    for order in ("layer", "chunk")[: 2 if side == "one" else 1]:
        _, grads = value_and_grad(model, TOTAL, order=order, **how)({"layer": params}, batch)
        assert_close(grads["layer"], wanted, 1e-10)


OPTIONS = {
    "causal": {},
    "window": {"window": 3},
    "all at once": {"window": 3, "documents": True, "padding": True, "dropout": 0.3},
    "dropout": {"dropout": 0.3},
    "bidirectional": {"causal": False, "documents": True, "padding": True, "dropout": 0.3},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_attending_layers_can_be_cut(kind):
    options, batch = OPTIONS[kind], packed(3, 9, 1)
    rule = "segments" if options.get("documents") else None
    assert_streams(attention(**options), attention_params(), batch.row["x"], batch, segments=rule, draws=6)


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_of_rows_on_both_sides_is_refused(window):
    with pytest.raises(ModelError) as caught:
        attention(causal=False, window=window)
    assert str(caught.value) == (
        f"attending: window is {window} with causal=False; a window is a whole number from 1 and needs causal=True "
        "(None: no window)"
    )


def gates(p, x):
    return torch.sigmoid(x @ p["f"] + 1.0), torch.tanh(x @ p["w"])


def gated_recurrence():
    """s_t = f_t s_{t-1} + w_t for a run of rows at once: s_t = Σ_j exp(l_t - l_j) w_j + exp(l_t) s_0, l = Σ log f."""

    def body(p, x, state, batch):
        forget, inputs = gates(p, x)
        logs = forget.log().cumsum(dim=1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)[..., None]
        decay = (logs[:, :, None] - logs[:, None]).masked_fill(later, -torch.inf).exp()
        states = torch.einsum("btsw,bsw->btw", decay, inputs) + logs.exp() * state[:, None]
        return x + states @ p["o"], states[:, -1]

    return recurrent(body, lambda p, batch: p["s"].expand(batch.num_examples, W))


def one_row_after_the_other(p, x):
    forget, inputs = gates(p, x)
    state, states = p["s"].expand(x.shape[0], W), []
    for row in range(x.shape[1]):
        state = forget[:, row] * state + inputs[:, row]
        states.append(state)
    return x + torch.stack(states, dim=1) @ p["o"]


def recurrent_params():
    return {"f": draw("f", W, W), "w": draw("w", W, W), "o": draw("o", W, W), "s": draw("s", W)}


@given(seed=st.integers(0, 99), rows=st.integers(1, 11), order=st.sampled_from(["layer", "chunk"]), how=HOWS)
def test_a_recurrence_worked_in_parallel_has_the_gradient_of_one_row_after_the_other(seed, rows, order, how):
    batch, params = packed(3, rows, seed), recurrent_params()
    _, grads = value_and_grad(only(gated_recurrence()), TOTAL, order=order, **how)({"layer": params}, batch)
    wanted = autograd(lambda p: one_row_after_the_other(p, batch.row["x"]), params, batch)
    assert_close(grads["layer"], wanted, 1e-10)


def test_recurrent_layers_can_be_cut():
    batch = packed(3, 9, 2)
    assert_streams(gated_recurrence(), recurrent_params(), batch.row["x"], batch, segments=None)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
def test_all_cuts_see_one_dropout_mask_in_kv_and_in_rows(chunk, causal):
    """Outputs are the masks of ones, so that no rounding can hide another one."""

    def kv(p, x, batch):
        return random.dropout(x, 0.5, random.fold_in(batch.constant["key"], "kv"), batch)

    def rows(p, x, kv, batch):
        row = torch.arange(batch.first_row, batch.first_row + x.shape[1])
        seen = (torch.arange(kv.shape[1]) <= row[:, None]).to(x) if causal else x.new_ones(x.shape[1], kv.shape[1])
        return random.dropout(x, 0.5, random.fold_in(batch.constant["key"], "rows"), batch) * 64 + seen @ kv

    form, batch = attending(kv, rows, causal=causal), packed(4, 9, 5)
    x = torch.ones(4, 9, W, dtype=torch.float64)
    whole = form.full((), x, batch)
    for num in (1, 2, 4):
        pieces = batch.microbatches(num)
        assert_equal(torch.cat([form.forward((), x[: 4 // num], piece, chunk) for piece in pieces]), whole)
    assert len(whole.unique()) > 4


def adapted(p, x):
    return x @ (p["base"] + p["lora"]["a"] @ p["lora"]["b"])


def adapted_attention():
    def kv(p, x, batch):
        return adapted(p, x)[:, :, None]

    def rows(p, x, kv, batch):
        x = x + attend(x[:, :, None], kv, kv)[:, :, 0]
        return x + torch.tanh(adapted(p, x))

    return attending(kv, rows)


ADAPTED = Model(
    (
        Layer("embed", rowwise(lambda p, x, batch: p[batch.row["tokens"]]), "table"),
        *(Layer(f"block{index}", adapted_attention(), f"block{index}") for index in range(3)),
        Layer("head", rowwise(lambda p, x, batch: x @ p.T), "table"),
    )
)


def adapted_params():
    params = {"table": draw("table", V, W)}
    for index in range(3):
        lora = {"a": draw(f"a{index}", W, 2), "b": draw(f"b{index}", 2, W)}
        params[f"block{index}"] = {"base": draw(f"base{index}", W, W), "lora": lora}
    return params


@pytest.mark.parametrize(("order", "recompute"), [("layer", True), ("layer", False), ("chunk", True)])
@pytest.mark.parametrize("kind", ["all but adapters", "the middle block"])
def test_adapters_get_the_full_gradient_where_no_input_needs_one(kind, recompute, order):
    params = adapted_params()
    tokens = (random.uniform(random.key(1), (2, 6)) * V).long()
    batch = Batch(row={"tokens": tokens, "labels": tokens})

    def frozen(path, leaf):
        return "lora" not in path if kind == "all but adapters" else path.startswith("block1")

    before = tree.map(torch.clone, params)
    function = value_and_grad(ADAPTED, sft(), chunk=4, order=order, recompute=recompute, frozen=frozen)
    _, grads = function(params, batch)
    assert_equal(params, before)
    _, wanted = reference.value_and_grad(ADAPTED, sft())(params, batch)
    _, wanted = tree.partition(wanted, frozen)
    assert_close(grads, wanted, 1e-10)
    trained = dict(zip(tree.paths(grads), tree.leaves(grads), strict=True))
    names = {f"block{index}.lora.{part}" for index in range(3) for part in "ab"}
    others = {f"block{index}.{part}" for index in (0, 2) for part in ("base", "lora.a", "lora.b")}
    assert set(trained) == (names if kind == "all but adapters" else {"table"} | others)
    assert all(leaf.abs().max() > 1e-6 for leaf in trained.values())


@pytest.mark.parametrize("kind", ["causal", "window", "bidirectional", "recurrent"])
def test_bfloat16_gradients_are_float32_and_err_at_most_twice_as_much_as_plain_torch(kind):
    """The error over some seeds and chunks: that of a single one is luck."""
    options = {"causal": {}, "window": {"window": 3}, "bidirectional": {"causal": False}}
    model = only(attention(**options[kind]) if kind in options else gated_recurrence())
    params = attention_params() if kind in options else recurrent_params()
    low = {"layer": in_dtype(params, torch.bfloat16)}
    errors = {"found": 0.0, "plain": 0.0}
    for seed in range(4):
        batch = packed(2, 24, seed)
        batch = replace(batch, row=in_dtype(batch.row, torch.bfloat16))
        wide = replace(batch, row=in_dtype(batch.row, torch.float64))
        _, exact = reference.value_and_grad(model, TOTAL)(in_dtype(low, torch.float64), wide)
        _, plain = reference.value_and_grad(model, TOTAL)(low, batch)
        _, found = value_and_grad(model, TOTAL, chunk=1 + 2 * seed)(low, batch)
        assert {leaf.dtype for leaf in tree.leaves(found)} == {torch.float32}
        errors["found"] += gradient_error(found, exact)
        errors["plain"] += gradient_error(plain, exact)
    assert errors["found"] <= 2 * errors["plain"]


def in_dtype(leaves, dtype):
    return tree.map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, leaves)


def test_a_bfloat16_head_keeps_what_64_chunks_add():
    """1, then 255 rows of 0.001: a sum in bfloat16 stays at 1."""
    addend = torch.tensor(0.001).bfloat16()
    x = torch.cat([torch.ones(1, dtype=torch.bfloat16), addend.expand(255)]).reshape(1, -1, 1)
    batch = Batch(row={"x": x, "dy": torch.ones_like(x)})
    model = Model((Layer("head", rowwise(lambda p, x, batch: batch.row["x"] * p), "head"),))
    _, grads = value_and_grad(model, TOTAL, chunk=4)({"head": torch.ones(1, dtype=torch.bfloat16)}, batch)
    assert grads["head"].dtype == torch.float32
    assert grads["head"].item() == pytest.approx(1 + 255 * addend.item(), rel=2**-8)
