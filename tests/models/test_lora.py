"""Adapters: gradients of a dense reference by every way of running, exact merges, and what is refused."""

import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dense
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rpfunc import Batch, Layer, Model, State, memory, optim, random, train_steps, tree, value_and_grad
from rpfunc.errors import ModelError
from rpfunc.models import decoder, lora
from rpfunc.objectives import sft
from rpfunc.stream import attending, opaque, recurrent, rowwise
from rpfunc.testing import assert_close, assert_computes, assert_equal_bits, assert_streams
from rpfunc.testing.oracles import assert_untouched
from rpfunc.train import checkpoint

EVERYTHING = ("embedding", "attention.*", "mlp.*", "projection")
WAYS = [
    {},
    {"chunk": 1},
    {"chunk": 2},
    {"chunk": 9},
    {"chunk": 3, "order": "chunk"},
    {"recompute": False},
    {"microbatches": 3, "chunk": 2, "workers": 3},
    {"microbatches": 2, "workers": 3, "chunk": 4, "order": "chunk", "plan": "F0:2 X2:5 B0:1 B1:2"},
]


def config_of(tied=True, layers=3, **options):
    return decoder.DecoderConfig(
        vocabulary=7, width=6, layers=layers, heads=2, kv_heads=1, head_size=4, mlp_width=5, tied=tied, deviation=None,
        **options,
    )  # fmt: skip


def filled(params, seed=5):
    """The parameters with A and B drawn at random, so that both have gradients."""
    drawn = random.key(seed)

    def fill(path, leaf):
        if lora.frozen(path, leaf):
            return leaf
        return (random.normal(random.fold_in(drawn, path), tuple(leaf.shape), torch.float64) * 0.4).to(leaf.dtype)

    leaves, structure = tree.flatten(params)
    return tree.unflatten(structure, [fill(*pair) for pair in zip(tree.paths(params), leaves, strict=True)])


def adapted(config, targets=EVERYTHING, dtype=torch.float64, **options):
    options = {"rank": 2, "alpha": 3.0, **options}
    plain, params = decoder.model(config), decoder.init(config, random.key(0), dtype)
    model, params = lora.adapt(plain, params, lora.LoraConfig(targets, **options), random.key(1))
    return model, filled(params)


def tokens_of(num_examples=3, num_rows=6, seed=0, **constant):
    tokens = torch.randint(0, 7, (num_examples, num_rows), generator=torch.Generator().manual_seed(seed))
    return Batch(row={"tokens": tokens, "labels": tokens}, constant=constant)


def dense_gradients(config, params, batch, scale):
    """The oracle: W + scale B A spelled out for every path, plain torch, torch.autograd; A and B alone are leaves."""
    plain, adapters = lora.split(params)

    def loss(adapters):
        weights = {path: part for subtree in adapters.values() for path, part in subtree.items()}

        def merged(tree, path):
            if isinstance(tree, dict):
                return {name: merged(part, f"{path}.{name}") for name, part in tree.items()}
            if path not in weights:
                return tree
            return tree + scale * torch.einsum("or,ri->oi", weights[path]["B"], weights[path]["A"])

        whole = {name: merged(subtree, name) for name, subtree in plain.items()}
        head = plain["embedding"] if config.tied else plain["head"]
        whole["head"] = merged(head, "head.projection")
        whole["norm"] = plain["norm"]
        untied = config_of(tied=False, layers=config.layers)
        logits = [dense.decoder_logits(whole, row, untied) for row in batch.row["tokens"]]
        return dense.next_token_loss(logits, batch.row["labels"])

    return dense.value_and_grad(loss, adapters)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_are_those_of_the_dense_reference_by_every_way(way, tied):
    config = config_of(tied)
    model, params = adapted(config)
    batch = tokens_of()
    loss, wanted = dense_gradients(config, params, batch, scale=3.0 / 2)
    with assert_untouched(params, batch):
        result, grads = value_and_grad(model, sft(), frozen=lora.frozen, **way)(params, batch)
    assert_close({"loss": result.loss}, {"loss": loss}, 1e-10)
    plain, found = lora.split(grads)
    assert_close(found, wanted, 1e-10)
    assert all(float(leaf.abs().max()) > 1e-8 for leaf in tree.leaves(found))
    assert tree.leaves(plain) == []
    assert plain.keys() == {"embedding", "norm", *(f"block{i}" for i in range(3))} | ({"head"} if not tied else set())


@settings(max_examples=8)
@given(
    targets=st.sets(
        st.sampled_from(["embedding", "query", "value", "block1.mlp.*", "mlp.down", "projection"]), min_size=1
    ),
    chunk=st.sampled_from([None, 1, 2, 5, 8]),
    microbatches=st.integers(1, 3),
    frozen=st.booleans(),
    dropout=st.sampled_from([0.0, 0.5]),
    stabilised=st.booleans(),
)
def test_every_cut_computes_one_function(targets, chunk, microbatches, frozen, dropout, stabilised):
    model, params = adapted(config_of(layers=2), tuple(targets), dropout=dropout, rank_stabilised=stabilised)
    batch = tokens_of(key=random.key(2))
    if frozen:
        whole, cut = (
            value_and_grad(model, sft(), frozen=lora.frozen, **how)(params, batch)
            for how in ({}, {"chunk": chunk, "microbatches": microbatches})
        )
        assert_close(cut[1], whole[1], 1e-10)
    function = value_and_grad(model, sft(), chunk=chunk, microbatches=microbatches)
    assert_computes(function, model, sft(), params, batch, tolerance=1e-10)


def test_new_adapters_change_no_output_and_are_small():
    config = config_of()
    plain, params = decoder.model(config), decoder.init(config, random.key(0), torch.bfloat16)
    model, adapted = lora.adapt(plain, params, lora.LoraConfig(("query", "embedding"), rank=3), random.key(1))
    batch = tokens_of()
    assert torch.equal(model(adapted, batch), plain(params, batch))
    kept, added = lora.split(adapted)
    assert all(one is other for one, other in zip(tree.leaves(kept), tree.leaves(params), strict=True))
    parts = added["lora_block0"]["block0.attention.query"]
    assert {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in parts.items()} == {
        "A": ((3, 6), torch.float32),
        "B": ((8, 3), torch.float32),
    }
    assert {name: tuple(leaf.shape) for name, leaf in added["lora_embedding"]["embedding"].items()} == {
        "A": (3, 6),
        "B": (7, 3),
    }
    blocks = [added[f"lora_block{i}"][f"block{i}.attention.query"]["A"] for i in range(2)]
    assert not torch.equal(*blocks)


def test_the_start_of_a_is_normal_of_variance_one_over_inputs():
    plain = Model((Layer("only", rowwise(lambda p, x, batch: F.linear(batch.row["x"], p)), "weight"),))
    params = {"weight": torch.zeros(3, 400)}
    _, params = lora.adapt(plain, params, lora.LoraConfig(("only",), rank=50), random.key(0))
    a = params["lora_only"]["only"]["A"]
    assert a.std().item() == pytest.approx(1 / 20, rel=0.02)
    assert abs(a.mean().item()) < 0.002


def test_freezing_one_blocks_adapters_leaves_the_others_theirs():
    """Block inputs need no gradient of their own, and a block between is frozen: nothing may be lost before it."""
    model, params = adapted(config_of(), ("block*.attention.*", "block*.mlp.*"))
    batch = tokens_of(1, 6)

    def mask(path, leaf):
        return lora.frozen(path, leaf) or path.startswith("lora_block1")

    _, all_grads = value_and_grad(model, sft(), frozen=lora.frozen, chunk=4)(params, batch)
    _, grads = value_and_grad(model, sft(), frozen=mask, chunk=4)(params, batch)
    assert tree.leaves(grads["lora_block1"]) == []
    for name in ("lora_block0", "lora_block2"):
        assert_close(grads[name], all_grads[name], 1e-12)
        assert all(float(leaf.abs().max()) > 1e-8 for leaf in tree.leaves(grads[name]))


@pytest.mark.parametrize("donate", [False, True])
def test_training_moves_adapters_alone(donate):
    model, params = adapted(config_of())
    before = tree.map(torch.clone, params)
    optimizer = optim.adamw(0.01)
    state = State.create(params, optimizer, lora.frozen)
    assert all("lora_" in path for path in tree.paths(state.optimizer_state) if path.split(".")[-1] in ("mu", "nu"))
    options = {"model": model, "objective": sft(), "optimizer": optimizer, "frozen": lora.frozen, "donate": donate}
    *_, (end, _) = train_steps(state, [tokens_of()] * 3, **options)
    kept, trained = lora.split(end.params)
    assert_equal_bits(kept, lora.split(before)[0])
    assert all(one is other for one, other in zip(tree.leaves(kept), tree.leaves(lora.split(params)[0]), strict=True))
    moved = zip(tree.leaves(trained), tree.leaves(lora.split(before)[1]), strict=True)
    assert all(not torch.equal(one, other) for one, other in moved)


def test_the_base_may_be_a_mapped_file_which_training_leaves_alone(tmp_path):
    config, path = config_of(), tmp_path / "base.safetensors"
    plain = decoder.init(config, random.key(0))
    leaves, structure = tree.flatten(plain)
    save_file(dict(zip(tree.paths(plain), leaves, strict=True)), path)
    before = path.read_bytes()
    with safe_open(path, framework="pt") as file:
        mapped = tree.unflatten(structure, [file.get_tensor(name) for name in tree.paths(plain)])
    found = []
    for base in (mapped, plain):
        model, params = lora.adapt(decoder.model(config), base, lora.LoraConfig(EVERYTHING), random.key(1))
        optimizer = optim.adamw(0.1)
        state = State.create(params, optimizer, lora.frozen)
        options = {"model": model, "objective": sft(), "optimizer": optimizer, "frozen": lora.frozen, "workers": 2}
        *_, (end, _) = train_steps(state, [tokens_of()] * 2, donate=True, **options)
        found.append(lora.split(end.params)[1])
    assert_equal_bits(*found)
    assert_equal_bits(mapped, decoder.init(config, random.key(0)))
    assert path.read_bytes() == before


def test_a_checkpoint_holds_the_adapters_alone_and_training_goes_on_from_it(tmp_path):
    model, params = adapted(config_of(), dropout=0.2)
    optimizer = optim.adamw(0.1)
    options = {"model": model, "objective": sft(), "optimizer": optimizer, "frozen": lora.frozen}
    batches = [tokens_of(seed=seed, key=random.key(seed)) for seed in range(4)]
    states = [State.create(params, optimizer, lora.frozen)]
    states += [state for state, _ in train_steps(states[0], batches, **options)]
    base, trained = lora.split(states[2].params)
    path = tmp_path / "adapters"
    checkpoint.save(path, State(trained, states[2].optimizer_state, 2))
    held = load_file(path)
    assert {name for name in held if name.startswith("params.")} == {f"params.{each}" for each in tree.paths(trained)}
    size = sum(leaf.numel() for leaf in tree.leaves(trained))
    assert sum(leaf.numel() for leaf in held.values()) < 3 * size + 10  # with both moments
    like = State(lora.split(params)[1], states[0].optimizer_state)
    read = checkpoint.load(path, like)
    resumed = State({**base, **read.params}, read.optimizer_state, read.step)
    *_, (end, _) = train_steps(resumed, batches[2:], **options)
    assert_equal_bits(lora.split(end.params)[1], lora.split(states[4].params)[1])
    assert_equal_bits(end.optimizer_state, states[4].optimizer_state)


USED = {
    "linear": lambda p, x, batch: F.linear(batch.row["x"], p),
    "look-up": lambda p, x, batch: F.embedding(batch.row["labels"], p),
}


@pytest.mark.parametrize("frozen", [lora.frozen, None])
@pytest.mark.parametrize("use", USED)
def test_no_merged_weight_and_no_gradient_of_a_weights_size_is_made(use, frozen):
    width = 256
    params = {"weight": torch.ones(width, width)}
    model = Model((Layer("only", rowwise(USED[use]), "weight"),))
    model, params = lora.adapt(model, params, lora.LoraConfig(("only",), rank=2), random.key(0))
    params = filled(params)
    batch = Batch(row={"x": torch.ones(1, 2, width), "labels": torch.zeros(1, 2, dtype=torch.long)})
    taken = memory.peak(lambda: value_and_grad(model, sft(), frozen=frozen)(params, batch)).peak_bytes
    trained = 0 if frozen else params["weight"].nbytes
    assert taken < 1.5 * trained + params["weight"].nbytes / 2


# --- merging ---


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("targets", [EVERYTHING, ("projection",), ("embedding",), ("query", "mlp.up")], ids=str)
def test_a_merged_model_is_the_adapted_one_and_the_base_stays(targets, tied):
    config = config_of(tied)
    model, params = adapted(config, targets, dtype=torch.float32)
    batch = tokens_of()
    with assert_untouched(params):
        merged, weights = lora.merge(model, params)
    assert_close(merged(weights, batch), model(params, batch), 1e-6)
    assert_equal_bits(lora.split(params)[0], decoder.init(config, random.key(0)))
    assert_equal_bits(lora.merge(model, params)[1], weights)
    untied = {"head"} if not tied or targets != ("query", "mlp.up") else set()
    assert weights.keys() == {"embedding", "norm", *(f"block{i}" for i in range(3))} | untied
    merged.check(weights)
    untouched = decoder.model(config_of(tied="head" not in weights))
    assert torch.equal(untouched(weights, batch), merged(weights, batch))


def test_a_tied_head_is_untied_by_its_own_adapter_and_each_end_keeps_its_weight():
    model, params = adapted(config_of(), ("projection",))
    _, weights = lora.merge(model, params)
    assert weights["embedding"] is params["embedding"]
    assert not torch.equal(weights["head"], weights["embedding"])
    model, params = adapted(config_of(), ("embedding",))
    _, weights = lora.merge(model, params)
    assert weights["head"] is params["embedding"]
    assert not torch.equal(weights["head"], weights["embedding"])


def test_merging_rounds_once_and_can_be_taken_back():
    """In bfloat16 256 + 1 - 1 gives 255 where sums are rounded to it; and 16 x 16 random weights."""
    plain = Model((Layer("only", rowwise(lambda p, x, batch: F.linear(batch.row["x"], p)), "weight"),))
    for weight, a, b in [
        (torch.full((1, 1), 256.0), torch.ones(1, 1), torch.ones(1, 1)),
        tuple(random.normal(random.key(seed), (16, 16)) for seed in range(3)),
    ]:
        base = weight.bfloat16()
        kept = base.clone()
        config = lora.LoraConfig(("only",), rank=len(a), alpha=len(a))
        model, params = lora.attach(plain, {"weight": base}, {"only": {"A": a, "B": b}}, config)
        for _ in range(2):
            merged, weights = lora.merge(model, params)
            wanted = (kept.float() + (b[:, :, None] * a[None]).sum(1)).bfloat16()
            torch.testing.assert_close(weights["weight"], wanted, rtol=2**-8, atol=0)
            assert_equal_bits(lora.split(params)[0]["weight"], kept)
        x = Batch(row={"x": torch.eye(len(base)).bfloat16()[None]})
        assert torch.equal(merged(weights, x)[0].T, weights["weight"])  # what runs is the merged weight
    assert weights["weight"].dtype == torch.bfloat16


# --- any layer, any use of a weight ---


def forms():
    """One weight, used in F.linear in each form, and what the layer computes."""

    def linear(p, x, batch):
        return F.linear(x, p)

    def seen(p, x, kv, batch):
        later = torch.ones(batch.num_rows, kv.shape[1], dtype=torch.bool).triu(kv.shape[1] - batch.num_rows + 1)
        weights = (F.linear(x, p) @ kv.mT).masked_fill(later, 0.0)
        return weights @ kv

    def body(p, x, state, batch):
        outputs = F.linear(x, p).cumsum(1) + state[:, None]
        return outputs, outputs[:, -1]

    def all_rows(p, x, kv, batch):
        return F.linear(x, p) + kv.sum(1, keepdim=True)

    return {
        "rowwise": rowwise(linear),
        "opaque": opaque(linear),
        "attending": attending(linear, seen),
        "bidirectional": attending(linear, all_rows, causal=False),
        "recurrent": recurrent(body, lambda p, batch: p.new_zeros(batch.num_examples, 3)),
    }


@pytest.mark.parametrize("name", sorted(forms()))
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_every_form_takes_adapters_and_still_streams(name, dropout):
    x = random.normal(random.key(0), (3, 7, 3), torch.float64)
    weight = random.normal(random.key(1), (3, 3), torch.float64)
    model = Model((Layer("only", forms()[name], "weight"),))
    config = lora.LoraConfig(("only",), rank=2, dropout=dropout)
    model, params = lora.adapt(model, {"weight": weight}, config, random.key(2))
    params = filled(params)
    layer = model.layers[0]
    batch = Batch(row={"x": x}, constant={"key": random.key(3)})
    assert_streams(layer.form, layer.select(params), x, batch)
    if dropout == 0.0:
        merged = {"weight": weight + 8.0 * params["lora_only"]["only"]["B"] @ params["lora_only"]["only"]["A"]}
        assert_close(layer(params, x, batch), Layer("only", forms()[name], "weight")(merged, x, batch), 1e-12)


USES = {
    "F.linear": lambda w, x: F.linear(x, w),
    "F.linear by name": lambda w, x: F.linear(weight=w, input=x, bias=x.new_ones(4)),
    "F.linear with a bias": lambda w, x: F.linear(x, w, x.new_ones(4)),
    "@": lambda w, x: x @ w.mT,
    "einsum": lambda w, x: torch.einsum("oi,bti->bto", w, x),
    "indexing": lambda w, x: w[x.abs().long().sum(-1) % 4],
    "F.embedding": lambda w, x: F.embedding(x.abs().long().sum(-1) % 4, w),
    "F.embedding with padding": lambda w, x: F.embedding(x.abs().long().sum(-1) % 4, w, 2),
    "twice": lambda w, x: F.linear(x, w) + x @ w.T,
    "reshaped": lambda w, x: x @ w.reshape(2, 2, 3).flatten(0, 1).mT,
    "joined": lambda w, x: F.linear(x, torch.cat([w, w])),
    "by its shape": lambda w, x: F.linear(x, w) * (w.shape[0] + len(w) + w.dim() + w.numel()),
    "of itself": lambda w, x: F.linear(w, w) + x.sum(),
}


@pytest.mark.parametrize("use", USES)
def test_any_use_of_a_weight_is_that_of_the_merged_one(use):
    x = 2 * random.normal(random.key(0), (2, 5, 3), torch.float64)
    params = {"weight": random.normal(random.key(1), (4, 3), torch.float64)}
    model = Model((Layer("only", opaque(lambda p, x, batch: USES[use](p, batch.row["x"])), "weight"),))
    config = lora.LoraConfig(("only",), rank=2, alpha=1.0)
    adapted_model, params = lora.adapt(model, params, config, random.key(2))
    params = filled(params)
    batch = Batch(row={"x": x})
    layer = adapted_model.layers[0]

    def through_merged(a, b, weight):
        return model({"weight": weight + b @ a / 2}, batch)

    part = params["lora_only"]["only"]
    wanted, pull = torch.func.vjp(through_merged, part["A"], part["B"], params["weight"])
    found, pull_found = torch.func.vjp(
        lambda a, b, weight: layer({"lora_only": {"only": {"A": a, "B": b}}, "weight": weight}, (), batch),
        part["A"], part["B"], params["weight"],
    )  # fmt: skip
    assert_close(found, wanted, 1e-12)
    dy = random.normal(random.key(4), tuple(found.shape), torch.float64)
    if use == "F.embedding with padding":  # the merged weight's row has no gradient there, A and B included
        dy = dy.where((x.abs().long().sum(-1) % 4 != 2)[..., None], 0.0)
    assert_close(list(pull_found(dy)), list(pull(dy)), 1e-12)


def test_weights_of_experts_have_an_adapter_each():
    """A stack of weights (E, out, in) has stacks of A and B."""
    x = random.normal(random.key(0), (2, 3, 5), torch.float64)
    plain = Model((Layer("only", opaque(lambda p, x, batch: torch.einsum("eoi,bti->bteo", p, batch.row["x"])), "w"),))
    params = {"w": random.normal(random.key(1), (4, 2, 5), torch.float64)}
    model, params = lora.adapt(plain, params, lora.LoraConfig(("only",), rank=3, alpha=3.0), random.key(2))
    params = filled(params)
    part = params["lora_only"]["only"]
    assert (part["A"].shape, part["B"].shape) == ((4, 3, 5), (4, 2, 3))
    wanted = torch.stack([x @ (params["w"][e] + part["B"][e] @ part["A"][e]).T for e in range(4)], dim=2)
    assert_close(model(params, Batch(row={"x": x})), wanted, 1e-12)
    assert_close(*(m(p, Batch(row={"x": x})) for m, p in (lora.merge(model, params), (model, params))), 1e-12)


def test_dropout_is_on_the_adapters_input_alone_and_of_each_weight_apart():
    x = random.normal(random.key(0), (2, 4, 3), torch.float64)
    part = {name: random.normal(random.key(seed), (5, 3), torch.float64) for seed, name in enumerate(("one", "two"), 1)}

    def both(p, x, batch):
        return torch.stack([F.linear(batch.row["x"], p[name]) for name in ("one", "two")])

    plain = Model((Layer("only", opaque(both), "weights"),))
    config = lora.LoraConfig(("only.*",), rank=2, alpha=2.0, dropout=0.5)
    model, params = lora.adapt(plain, {"weights": part}, config, random.key(3))
    params = filled(params)
    batch = Batch(row={"x": x}, constant={"key": random.key(4)})
    found = model(params, batch)
    masks = []
    for index, name in enumerate(("one", "two")):
        adapter = params["lora_only"][f"only.{name}"]
        through = found[index] - x @ part[name].T  # = (mask * x / 0.5) A^T B^T: as many numbers as there are unknowns
        dropped = random.dropout(x, 0.5, random.fold_in(batch.constant["key"], f"lora.only.{name}"), batch)
        assert_close(through, dropped @ adapter["A"].T @ adapter["B"].T, 1e-12)
        masks.append(dropped == 0)
    assert not torch.equal(*masks)
    without = Batch(row={"x": x})
    merged = [
        part[name] + params["lora_only"][f"only.{name}"]["B"] @ params["lora_only"][f"only.{name}"]["A"]
        for name in part
    ]
    assert_close(model(params, without), torch.stack([x @ weight.T for weight in merged]), 1e-12)


# --- wrong implementations that the comparisons above must see ---


@pytest.mark.parametrize("wrong", ["scale", "transposed", "not in kv"])
def test_the_dense_reference_sees_wrong_adapters(wrong, monkeypatch):
    config = config_of()
    products = sys.modules["rpfunc.models.lora_products"]
    if wrong == "scale":
        monkeypatch.setattr(lora.LoraConfig, "scale", property(lambda self: self.alpha))
    elif wrong == "transposed":
        linear = products.Adapting._linear
        monkeypatch.setattr(products.Adapting, "_linear", lambda self, x, a: linear(self, x.flip(-1), a))
    model, params = adapted(config)
    if wrong == "not in kv":
        blocks = [layer for layer in model.layers if layer.name.startswith("block")]
        for layer in blocks:
            object.__setattr__(layer.form, "kv", lambda p, x, batch, kv=layer.plain.form.kv: kv(p["plain"], x, batch))
    batch = tokens_of()
    _, wanted = dense_gradients(config, params, batch, scale=3.0 / 2)
    _, grads = value_and_grad(model, sft(), frozen=lora.frozen, chunk=2)(params, batch)
    with pytest.raises(AssertionError):
        assert_close(lora.split(grads)[1], wanted, 1e-10)


# --- what is refused ---


def test_targets_that_match_nothing_are_named_with_near_paths():
    config = config_of()
    with pytest.raises(ModelError) as error:
        adapted(config, ("quary", "block9.mlp.up", "embedding", "attention.norm"))
    assert str(error.value).splitlines() == [
        "lora: 3 problems",
        "  - target 'quary' matches no leaf of two dimensions or more; near it are block0.attention.query",
        "  - target 'block9.mlp.up' matches no leaf of two dimensions or more; near it are block2.mlp.up, "
        "block1.mlp.up, block0.mlp.up",
        str(error.value).splitlines()[3],
    ]
    assert str(error.value).splitlines()[3].startswith("  - target 'attention.norm' matches no leaf of two dimensions")


def test_options_that_cannot_work_are_listed():
    with pytest.raises(ModelError) as error:
        lora.LoraConfig((), rank=0, alpha=0.0, dropout=1.0)
    assert str(error.value) == (
        "lora: 4 problems\n"
        "  - targets is (), it must be a tuple of patterns, such as ('query', 'value')\n"
        "  - rank is 0, it must be at least 1\n"
        "  - alpha is 0.0, it must be positive and finite\n"
        "  - dropout is 1.0, it must be at least 0 and below 1"
    )


def test_adapters_that_do_not_fit_are_listed():
    config = config_of()
    plain, params = decoder.model(config), decoder.init(config, random.key(0))
    adapters = {
        "block0.attention.quary": {"A": torch.zeros(2, 6), "B": torch.zeros(8, 2)},
        "block0.attention.query": {"A": torch.zeros(6, 2), "B": torch.zeros(8, 2)},
    }
    with pytest.raises(ModelError) as error:
        lora.attach(plain, params, adapters, lora.LoraConfig(("query",), rank=2))
    assert str(error.value) == (
        "lora: 2 problems\n"
        "  - the model has no weight 'block0.attention.quary'\n"
        "  - adapter block0.attention.query has shapes {'A': (6, 2), 'B': (8, 2)}, its weight and rank 2 need "
        "{'A': (2, 6), 'B': (8, 2)}"
    )


def test_a_second_set_of_adapters_is_refused():
    model, params = adapted(config_of(), ("query",))
    with pytest.raises(ModelError, match=r"- params has a subtree 'lora_block0' already"):
        lora.adapt(model, params, lora.LoraConfig(("plain.mlp.up",)), random.key(0))


def test_a_weight_read_twice_by_one_layer_is_refused():
    both = rowwise(lambda p, x, batch: F.linear(F.linear(batch.row["x"], p["one"]), p["two"]))
    model = Model((Layer("only", both, {"one": "weight", "two": "weight"}),))
    with pytest.raises(ModelError, match=r"lora: layer 'only' reads only.one twice, so its uses cannot be told apart"):
        lora.adapt(model, {"weight": torch.ones(3, 3)}, lora.LoraConfig(("only.one",)), random.key(0))


def test_a_form_of_ones_own_is_refused_by_name():
    class Mine:
        def full(self, params, x, batch):
            return F.linear(batch.row["x"], params)

    model = Model((Layer("only", Mine(), "weight"),))
    with pytest.raises(
        ModelError, match=r"lora: layer 'only' has a Mine as its form, adapters need one of rpfunc.stream"
    ):
        lora.adapt(model, {"weight": torch.ones(3, 3)}, lora.LoraConfig(("only",)), random.key(0))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda p, x, batch: batch.row["x"] @ p.mT,
            r"lora: only is used otherwise than in F.linear\(x, weight\) or F.embedding\(ids, weight\), so its adapter "
            r"has no input to drop from; dropout=0 works",
        ),
        (
            lambda p, x, batch: F.linear(batch.row["x"].flatten(0, 1), p),
            r"lora: the input of only is of shape \(10, 3\); dropout is drawn by example and row, so it needs "
            r"\(2, 5, ...\), or dropout=0",
        ),
    ],
    ids=["another use", "no rows"],
)
def test_dropout_where_there_are_no_rows_to_draw_it_for(function, text):
    model = Model((Layer("only", opaque(function), "weight"),))
    config = lora.LoraConfig(("only",), dropout=0.5)
    model, params = lora.adapt(model, {"weight": torch.ones(3, 3)}, config, random.key(0))
    batch = Batch(row={"x": torch.ones(2, 5, 3)}, constant={"key": random.key(0)})
    with pytest.raises(ModelError, match=text):
        model(params, batch)
