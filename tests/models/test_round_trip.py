"""Folders: transformers -> load -> save -> transformers -> load, every tensor bit for bit."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, batch, module, transformers

from rpfunc import tree
from rpfunc.models import hf
from rpfunc.testing.oracles import assert_equal_bits

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def tensors(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_survives_the_round_trip(family, tmp_path_factory):
    @settings(max_examples=4)
    @given(FAMILIES[family](), DTYPES, st.booleans())
    def check(config, dtype, mapped):
        folder = tmp_path_factory.mktemp("round")
        made = module(config).to(dtype)
        made.save_pretrained(folder / "theirs")
        model, params = hf.load(folder / "theirs", mapped=mapped)
        assert {leaf.dtype for leaf in tree.leaves(params)} == {dtype}
        assert all(leaf.is_contiguous() for leaf in tree.leaves(params))
        hf.save(model, params, folder / "ours")
        assert_equal_bits(tensors(folder / "ours"), tensors(folder / "theirs"))
        back = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours", dtype="auto")
        # transformers widens some norms as it reads them
        assert_equal_bits(dict(back.to(dtype).state_dict()), dict(made.state_dict()))
        assert back.config.to_diff_dict() == made.config.to_diff_dict() | {"dtype": str(dtype).removeprefix("torch.")}
        assert_equal_bits(hf.load(folder / "ours")[1], params)
        assert_equal_bits(tree.map(torch.clone, hf.load(made)[1]), params)

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_folder_has_equal_logits(family, tmp_path):
    @settings(max_examples=2)
    @given(FAMILIES[family](), st.integers(0, 99))
    def check(config, seed):
        rows = batch(2, 6, seed)
        model, params = hf.load(module(config, seed))
        hf.save(model, params, tmp_path)
        back = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="eager", experts_implementation="eager"
        )
        found = back(input_ids=rows.row["tokens"]).logits.detach()
        assert (found - model(params, rows)).abs().max() <= 1e-5 * max(1.0, float(found.abs().max()))

    check()


def llama(**fields):
    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": None}
    return transformers.LlamaConfig(**(sizes | heads | fields))


@pytest.mark.parametrize("shard_bytes", [1, 500, 1000])
def test_shards_both_ways(tmp_path, shard_bytes):
    made = module(llama())
    model, params = hf.load(made)
    hf.save(model, params, tmp_path, shard_bytes=shard_bytes)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert not (tmp_path / "model.safetensors").exists()
    assert not list(tmp_path.glob("*.partial*"))
    for path in shards:
        with safe_open(path, framework="pt") as file:
            held = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
            assert held <= shard_bytes or len(list(file.keys())) == 1
    assert_equal_bits(tree.map(torch.clone, params), hf.load(tmp_path)[1])
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_equal_bits(dict(back.state_dict()), dict(made.state_dict()))
    made.save_pretrained(tmp_path / "theirs", max_shard_size=1000)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    assert_equal_bits(tree.map(torch.clone, params), hf.load(tmp_path / "theirs")[1])


def test_saving_over_a_checkpoint_leaves_nothing_of_it(tmp_path):
    one, two = (hf.load(module(llama(num_hidden_layers=layers))) for layers in (3, 1))
    (tmp_path / "notes.txt").write_text("mine")
    hf.save(*one, tmp_path, shard_bytes=500)
    hf.save(*two, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]
    assert_equal_bits(hf.load(tmp_path)[1], tree.map(torch.clone, two[1]))
    hf.save(*one, tmp_path, shard_bytes=500)
    assert not (tmp_path / "model.safetensors").exists()
    assert_equal_bits(hf.load(tmp_path)[1], tree.map(torch.clone, one[1]))


def test_saving_over_the_files_that_parameters_are_mapped_from(tmp_path):
    made = module(llama())
    made.save_pretrained(tmp_path)
    model, params = hf.load(tmp_path)
    before = tree.map(torch.clone, params)
    hf.save(model, params, tmp_path)
    assert_equal_bits(params, before)
    assert_equal_bits(hf.load(tmp_path)[1], before)


def test_names_without_prefix_and_stored_buffers(tmp_path):
    config = transformers.GPT2Config(vocab_size=17, n_embd=6, n_head=2, n_layer=1, bos_token_id=1, eos_token_id=1)
    made = module(config)
    made.save_pretrained(tmp_path)
    stored = {
        name.removeprefix("transformer."): each for name, each in load_file(tmp_path / "model.safetensors").items()
    }
    stored["h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    stored["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_equal_bits(hf.load(tmp_path)[1], tree.map(lambda leaf: leaf.contiguous(), hf.load(made)[1]))


def test_a_tied_head_stored_twice_is_one_and_two_different_ones_are_refused(tmp_path):
    module(llama(tie_word_embeddings=True)).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "head" not in hf.load(tmp_path)[1]
    stored["lm_head.weight"][3, 1] += 1
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight") as caught:
        hf.load(tmp_path)
    assert "tie_word_embeddings is true" in str(caught.value)


def test_a_head_that_is_untied_by_its_config_is_saved(tmp_path):
    model, params = hf.load(module(llama(tie_word_embeddings=True)))
    untied = hf.from_config({**model.config, "tie_word_embeddings": False})
    hf.save(untied, {**params, "head": params["embedding"] + 1}, tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(back.lm_head.weight, back.model.embed_tokens.weight + 1)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


def test_dtype_casts_once(tmp_path):
    made = module(llama())
    made.save_pretrained(tmp_path)
    _, params = hf.load(tmp_path, dtype=torch.bfloat16)
    wanted = tree.map(lambda leaf: leaf.to(torch.bfloat16), hf.load(made)[1])
    assert_equal_bits(params, wanted)
