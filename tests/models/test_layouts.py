"""Layouts of stored tensors, and that the oracle sees wrong ones where every matrix is square."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import batch, module, oracle, transformers

from rpfunc.models import hf
from rpfunc.models.families.stored import Layout, Stored, build, table
from rpfunc.testing.oracles import assert_equal_bits

SQUARE = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 4}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": None}


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_layouts_by_hand_and_back(experts, width, hidden):
    """The table of GPT-OSS: (in, out), gate and up in turn."""
    layout = Layout("e w (x part)", "e part", "x w", {"part": 2})
    shape = (experts, width, 2 * hidden)
    paths = tuple((index, part) for index in range(experts) for part in ("gate", "up"))
    stored = Stored("gate_up", shape, paths, layout)
    tensor = torch.arange(experts * width * 2 * hidden).reshape(shape)
    leaves = stored.leaves(tensor)
    assert stored.leaf_shapes() == [(hidden, width)] * len(paths) == [tuple(leaf.shape) for leaf in leaves]
    for (index, part), leaf in zip(paths, leaves, strict=True):
        assert torch.equal(leaf, tensor[index, :, part == "up" :: 2].T)
        assert leaf.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert torch.equal(stored.tensor(leaves), tensor)


def test_tables_and_trees():
    rows = {"a.0 a.1": ("fused", "2X W", Layout("(part x) w", "part", "x w", {"part": 2})), "b": ("plain", "W")}
    fused, plain = table(rows, {"X": 3, "W": 2}, path=("block0",), prefix="layers.0.")
    assert (fused.name, fused.shape, fused.paths) == (
        "layers.0.fused",
        (6, 2),
        (("block0", "a", 0), ("block0", "a", 1)),
    )
    assert plain == Stored("layers.0.plain", (2,), (("block0", "b"),))
    leaves = dict(zip((*fused.paths, *plain.paths), "xyz", strict=True))
    assert build(leaves) == {"block0": {"a": ("x", "y"), "b": "z"}}


def wrong_layouts():
    """Layouts that fit every shape, and are wrong."""
    return {
        "halves instead of turns": (".gate_up_proj", lambda t: torch.cat((t[..., ::2], t[..., 1::2]), dim=-1)),
        "up before gate": (".gate_up_proj", lambda t: t.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)),
        "down transposed": (".down_proj", lambda t: t.mT),
        "experts in another order": (".down_proj", lambda t: t.flip(0)),
        "output transposed": (".o_proj.weight", lambda t: t.T),
        "sinks in another order": (".sinks", lambda t: t.flip(0)),
    }


@pytest.mark.parametrize("wrong", wrong_layouts())
def test_the_oracle_sees_layouts_that_fit_square_matrices(wrong):
    made = module(transformers.GptOssConfig(**SQUARE, **HEADS, num_local_experts=4, num_experts_per_tok=2))
    rows = batch(2, 6)
    logits, _, _ = oracle(made, rows)
    model, params = hf.load(made)
    assert (model(params, rows) - logits).abs().max() <= 1e-5
    suffix, change = wrong_layouts()[wrong]
    changed = module(made.config)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if name.endswith(suffix):
                parameter.copy_(change(parameter.detach().clone()))
    _, params = hf.load(changed)
    assert (model(params, rows) - logits).abs().max() > 1e-3


@pytest.mark.parametrize("intermediate", [8, 12])
def test_gpt_oss_in_and_out(intermediate, tmp_path):
    """Errors of import and export that cancel show in one direction."""
    sizes = SQUARE | {"intermediate_size": intermediate}
    made = module(transformers.GptOssConfig(**sizes, **HEADS, num_local_experts=4, num_experts_per_tok=2))
    rows = batch(2, 6)
    logits, _, _ = oracle(made, rows)
    model, params = hf.load(made)
    assert (model(params, rows) - logits).abs().max() <= 1e-5
    gate_up, experts = made.model.layers[1].mlp.experts.gate_up_proj, params["block1"]["mlp"]["experts"]
    for index, expert in enumerate(experts):
        assert torch.equal(expert["gate"], gate_up[index, :, ::2].T)
        assert torch.equal(expert["up"], gate_up[index, :, 1::2].T)
    hf.save(model, params, tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager"
    )
    assert_equal_bits(dict(back.state_dict()), dict(made.state_dict()))
    assert torch.equal(oracle(back, rows)[0], logits)


def test_both_ways_of_storing_qwen3_experts(tmp_path):
    config = transformers.Qwen3MoeConfig(
        **SQUARE, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    )
    made = module(config)
    made.save_pretrained(tmp_path / "apart")
    made.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = [set(hf.transfer.files.read_tensors(tmp_path / kind, mapped=True)) for kind in ("apart", "fused")]
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in names[0]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names[1]
    (_, apart), (_, fused) = hf.load(tmp_path / "apart"), hf.load(tmp_path / "fused")
    assert_equal_bits(fused, apart)
    rows = batch(2, 6)
    model, params = hf.load(made)
    assert (model(params, rows) - oracle(made, rows)[0]).abs().max() <= 1e-5
    assert (model(apart, rows) - model(params, rows)).abs().max() <= 1e-6
