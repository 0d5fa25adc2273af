"""Adapters: gradients of a dense reference by every way of running, what training moves, exact merges."""

import sys

import pytest
import torch
import torch.nn.functional as F
from adapters import EVERYTHING, adapted, config_of, filled, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dense
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rpfunc import Batch, Layer, Model, State, memory, optim, random, train_steps, tree, value_and_grad
from rpfunc.models import decoder, lora
from rpfunc.objectives import sft
from rpfunc.stream import rowwise
from rpfunc.testing import assert_close, assert_computes, assert_equal_bits
from rpfunc.testing.oracles import assert_untouched
from rpfunc.train import checkpoint

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
    base, *parts = (random.normal(random.key(seed), (16, 16)) for seed in range(3))
    eighths = [(part * 8).round() / 8 for part in parts]  # their products and sums have no rounding in float32
    for weight, a, b in [(torch.full((1, 1), 256.0), torch.ones(1, 1), torch.ones(1, 1)), (base, *eighths)]:
        base = weight.bfloat16()
        kept = base.clone()
        config = lora.LoraConfig(("only",), rank=len(a), alpha=len(a))
        model, params = lora.attach(plain, {"weight": base}, {"only": {"A": a, "B": b}}, config)
        for _ in range(2):
            merged, weights = lora.merge(model, params)
            delta = (b[:, :, None] * a[None]).sum(1)
            assert torch.equal(weights["weight"], (kept.float() + delta).bfloat16())
            assert_equal_bits(lora.split(params)[0]["weight"], kept)
        x = Batch(row={"x": torch.eye(len(base)).bfloat16()[None]})
        assert torch.equal(merged(weights, x)[0].T, weights["weight"])  # what runs is the merged weight
    assert weights["weight"].dtype == torch.bfloat16
    assert not torch.equal(weights["weight"], kept + delta.bfloat16())  # rounded twice


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
