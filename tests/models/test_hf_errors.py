"""Checkpoints with faults: all are named at once, and nothing but safetensors is read."""

import inspect
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import batch, module, transformers

from rpfunc import Model, tree, value_and_grad
from rpfunc.errors import ModelError, OptionsError
from rpfunc.models import hf
from rpfunc.objectives import sft

SIZES = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def made():
    return module(transformers.LlamaConfig(**SIZES, num_key_value_heads=1, pad_token_id=None))


@pytest.fixture
def folder(made, tmp_path):
    made.save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change):
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def message(call, *arguments):
    with pytest.raises(ValueError, match=r"\w") as caught:
        call(*arguments)
    return str(caught.value)


COMPUTED = "needs one of torch.float64, torch.float32, torch.bfloat16, torch.float16"


@pytest.mark.parametrize(
    ("dtype", "needed"),
    [
        *[(each, COMPUTED) for each in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, "auto", 3)],
        ("bfloat16", "needs the dtype torch.bfloat16"),
    ],
    ids=str,
)
def test_dtypes_that_parameters_cannot_have(made, folder, dtype, needed):
    for source in (made, folder):
        with pytest.raises(OptionsError, match="dtype") as caught:
            inspect.unwrap(hf.load)(source, dtype=dtype)  # without the tests' checks of types
        assert str(caught.value) == f"load: dtype is {dtype!r}, {needed}"


def test_dtypes_that_a_layer_cannot_compute_with(folder):
    def half(stored):
        stored.update({name: each.half() for name, each in stored.items() if "mlp" in name})

    rewrite(folder, half)
    text = message(hf.load, folder)
    assert "one layer cannot compute with several dtypes" in text
    assert "load(..., dtype=torch.float32)" in text
    assert "3 leaves are torch.float16, block0.mlp.down among them" in text
    model, params = hf.load(folder, dtype=torch.float32)
    assert model(params, batch(1, 4)).dtype == torch.float32
    rewrite(folder, lambda stored: stored.update({name: each.to(torch.float8_e4m3fn) for name, each in stored.items()}))
    assert "is torch.float8_e4m3fn, at least 16 bits are needed; let transformers widen" in message(hf.load, folder)


@pytest.mark.parametrize("source", [None, 3, torch.nn.Linear(2, 2), torch.nn.DataParallel(torch.nn.Linear(2, 2))])
def test_sources_that_are_no_models(source):
    assert any(each in message(hf.load, source) for each in ("needs a folder, a GGUF file", "has no config as transf"))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 16, b"x" * 500])
def test_gguf_files_that_are_none(tmp_path, content):
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(content)
    assert f"checkpoint {tmp_path}/x.gguf: transformers cannot read it" in message(hf.load, tmp_path / "x.gguf")


def test_all_tensors_that_do_not_fit_are_listed(folder):
    def change(stored):
        del stored["model.norm.weight"], stored["model.layers.0.mlp.up_proj.weight"]
        stored["model.layers.1.mlp.up_proj.weight"] = torch.zeros(12, 8)
        stored["score.weight"] = torch.zeros(2, 8)
        stored["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(8, 4)
        stored["lm_head.weight"] = torch.zeros(17, 8, dtype=torch.int8)

    rewrite(folder, change)
    assert message(hf.load, folder) == f"checkpoint {folder}: 6 problems" + "".join(
        f"\n  - {line}"
        for line in [
            "lm_head.weight is torch.int8, floating-point numbers are needed",
            "model.layers.0.mlp.up_proj.weight is missing",
            "model.layers.0.self_attn.q_proj.weight has shape (8, 4), the config needs (8, 8)",
            "model.layers.1.mlp.up_proj.weight is unexpected",
            "model.norm.weight is missing",
            "score.weight is unexpected",
        ]
    )


def test_head_dim_is_never_derived_where_it_is_set(tmp_path):
    config = transformers.Qwen3Config(**(SIZES | {"hidden_size": 20}), num_key_value_heads=2, head_dim=8)
    module(config).save_pretrained(tmp_path)
    _, params = hf.load(tmp_path)
    assert params["block0"]["attention"]["query"].shape == (16, 20)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"head_dim": 10}))
    text = message(hf.load, tmp_path)
    assert "model.layers.0.self_attn.q_proj.weight has shape (16, 20), the config needs (20, 20)" in text
    assert "model.layers.0.self_attn.k_norm.weight has shape (8,), the config needs (10,)" in text


def test_a_module_without_a_head_is_refused(made):
    assert message(hf.load, made.model) == "module LlamaModel: lm_head.weight is missing"


def test_only_safetensors_are_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert message(hf.load, folder) == (
        f"checkpoint {folder}: has neither model.safetensors nor model.safetensors.index.json; pytorch_model.bin may "
        "run code or is of another format, and is never read"
    )


def test_code_in_a_folder_is_refused_and_not_run(folder):
    (folder / "modeling_llama.py").write_text("raise SystemExit('ran')")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_llama.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "auto_map is {'AutoModelForCausalLM': 'modeling_llama.Model'}; the field is not known" in message(
        hf.load, folder
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "[" * 200_000])
def test_configs_that_are_none(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin1"))
    assert f"checkpoint {folder}/config.json: " in message(hf.load, folder)


def test_folders_that_are_none(tmp_path):
    assert "has no config.json; a model folder is needed" in message(hf.load, tmp_path)
    assert "has no config.json" in message(hf.load, tmp_path / "missing")


@pytest.mark.parametrize("cut", [0, 4, 9, 300, -1])
def test_files_cut_short(folder, cut):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:cut])
    assert "is cut short or no safetensors file" in message(hf.load, folder)


def test_indexes_with_faults(folder, made):
    (folder / "model.safetensors").unlink()
    made.save_pretrained(folder, max_shard_size=1000)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    moved = {**index["weight_map"], "model.norm.weight": "../model.safetensors"}
    path.write_text(json.dumps(index | {"weight_map": moved}))
    assert "names '../model.safetensors', needs safetensors files beside it" in message(hf.load, folder)
    elsewhere = next(name for name in shards if name != index["weight_map"]["model.norm.weight"])
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {"model.norm.weight": elsewhere}}))
    assert "model.norm.weight is" in message(hf.load, folder)
    path.write_text(json.dumps(index))
    (folder / shards[0]).unlink()
    assert f"{shards[0]} is missing, the index names it" in message(hf.load, folder)
    for text in ("{}", "[]", '{"weight_map": 3}', "{", "[" * 200_000):
        path.write_text(text)
        assert "is no index of weights" in message(hf.load, folder)


def test_parameters_that_do_not_fit_are_not_saved(made, tmp_path):
    model, params = hf.load(made)
    wrong = {**params, "extra": torch.zeros(1), "norm": torch.zeros(9)}
    del wrong["head"]
    assert message(hf.save, model, wrong, tmp_path / "new") == (
        "params or gradients do not fit the config: 3 problems"
        "\n  - leaf extra is unexpected"
        "\n  - leaf head is missing"
        "\n  - leaf norm has shape (9,), the config needs shape (8,)"
    )
    assert not (tmp_path / "new").exists()
    plain = Model(model.layers)
    assert "model is a Model, needs a PretrainedModel" in message(hf.save, plain, params, tmp_path / "new")


def test_a_folder_that_cannot_be_written(made, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in message(hf.save, *hf.load(made), tmp_path / "file")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model-00001-of-00003.safetensors"])
def test_what_is_in_the_way_is_found_before_anything_is_written(made, tmp_path, name):
    (tmp_path / name).mkdir()
    assert f"{name} is a folder, where a file belongs; move it away" in message(hf.save, *hf.load(made), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_parameters_of_other_numbers_are_not_saved(made, tmp_path):
    model, params = hf.load(made)
    wrong = {**params, "norm": params["norm"].int(), "head": params["head"].to("meta"), "embedding": 3.0}
    assert message(hf.save, model, wrong, tmp_path / "new").split("\n")[1:] == [
        "  - leaf embedding has a float, the config needs shape (17, 8)",
        "  - leaf head has no numbers: it is on the device 'meta'",
        "  - leaf norm is torch.int32, floating-point numbers are needed",
    ]
    assert "they are a list, a dict as load gives is needed" in message(
        inspect.unwrap(hf.save), model, [1], tmp_path / "new"
    )
    assert not (tmp_path / "new").exists()


def llama(layers, tied=False):
    return module(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": layers}, tie_word_embeddings=tied))


def unfit(case):
    """Returns a module, gradients that do not fit it, and what is said of them."""
    made, other = llama(2), llama(3)
    params = hf.load(made)[1]
    grads = tree.map(torch.zeros_like, params)
    match case:
        case "deeper":
            return other, grads, "leaf block2.mlp.up is missing"
        case "without a subtree":
            return (
                made,
                {name: each for name, each in grads.items() if name != "block1"},
                "leaf block1.mlp.norm is missing",
            )
        case "of a tied model":
            return made, {name: each for name, each in grads.items() if name != "head"}, "leaf head is missing"
        case "a leaf for a subtree":
            return made, {**grads, "block0": torch.zeros(3)}, "leaf block0 is unexpected"
        case "untied by its config":
            tied = llama(2, tied=True)
            tied.config.tie_word_embeddings = False
            return tied, grads, "has no parameter lm_head.weight of its own"
        case "wider":
            made.config.hidden_size = 12
            return made, grads, "parameter model.norm.weight has shape (8,), its config needs (12,)"
    return made, None, "they are a NoneType"


@pytest.mark.parametrize(
    "case",
    ["deeper", "without a subtree", "of a tied model", "a leaf for a subtree", "untied by its config", "wider", "none"],
)
def test_nothing_is_written_where_something_does_not_fit(case):
    made, grads, needed = unfit(case)
    for parameter in made.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    with pytest.raises(ModelError, match="fit") as caught:
        inspect.unwrap(hf.write_grads)(made, grads)
    assert needed in str(caught.value)
    assert all(bool((parameter.grad == 7.0).all()) for parameter in made.parameters())


def test_gradients_that_do_not_fit_are_not_written(made):
    model, params = hf.load(made)
    _, grads = value_and_grad(model, sft())(params, batch(2, 5))
    wrong = {**grads, "norm": torch.zeros(9), "extra": torch.zeros(1)}
    assert "leaf extra is unexpected" in message(hf.write_grads, made, wrong)
    assert all(parameter.grad is None for parameter in made.parameters())


def test_frozen_leaves_have_no_grad(made):
    model, params = hf.load(made)
    frozen = lambda path, leaf: not path.endswith(("query", "norm"))  # noqa: E731
    _, grads = value_and_grad(model, sft(), frozen=frozen)(params, batch(2, 5))
    hf.write_grads(made, grads)
    trained = {name for name, parameter in made.named_parameters() if parameter.grad is not None}
    assert trained == {
        "model.layers.0.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight", "model.norm.weight",
    }  # fmt: skip


def test_a_leaf_frozen_inside_a_fused_tensor_has_zeros():
    made = module(transformers.GPT2Config(vocab_size=17, n_embd=6, n_head=2, n_layer=1, bos_token_id=1, eos_token_id=1))
    model, params = hf.load(made)
    frozen = lambda path, leaf: path != "block0.attention.key"  # noqa: E731
    _, grads = value_and_grad(model, sft(), frozen=frozen)(params, batch(2, 5))
    hf.write_grads(made, grads)
    grad = made.transformer.h[0].attn.c_attn.weight.grad
    assert torch.equal(grad[:, 6:12], grads["block0"]["attention"]["key"].T)
    assert not grad[:, :6].any()
    assert not grad[:, 12:].any()
    assert made.lm_head.weight.grad is None


def test_gradients_come_in_the_parameters_dtype(made):
    model, params = hf.load(made.to(torch.bfloat16))
    _, grads = value_and_grad(model, sft())(params, batch(2, 5))
    hf.write_grads(made, grads)
    assert {parameter.grad.dtype for parameter in made.parameters()} == {torch.bfloat16}
    assert {grad.dtype for grad in tree.leaves(grads)} == {torch.float32}
