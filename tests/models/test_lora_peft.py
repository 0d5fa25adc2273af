"""PEFT reads what is written here and the other way round, with equal logits; what is not supported is refused."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpfunc import Batch, random, tree
from rpfunc.errors import CheckpointError, ModelError
from rpfunc.models import decoder, hf, lora, lora_peft
from rpfunc.testing import assert_equal_bits

transformers = pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and of what it imports

TOKENS = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(0))
TARGETS = ("query", "mlp.down", "embedding", "projection")
MODULES = ["q_proj", "down_proj", "embed_tokens", "lm_head"]


def llama(tied=False):
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).eval()


def filled(params):
    leaves, structure = tree.flatten(params)
    pairs = zip(tree.paths(params), leaves, strict=True)
    drawn = [
        leaf if lora.frozen(path, leaf) else random.normal(random.fold_in(random.key(3), path), tuple(leaf.shape)) / 3
        for path, leaf in pairs
    ]
    return tree.unflatten(structure, drawn)


def logits_of(module):
    with torch.no_grad():
        return module(input_ids=TOKENS).logits


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stabilised", [False, True])
def test_peft_loads_what_is_written_and_gives_equal_logits(tmp_path, tied, stabilised):
    module = llama(tied)
    plain, params = hf.load(module)
    config = lora.LoraConfig(TARGETS, rank=3, alpha=5.0, rank_stabilised=stabilised)
    model, params = lora.adapt(plain, params, config, random.key(0))
    params = filled(params)
    lora_peft.save(model, params, tmp_path)
    before = logits_of(module)
    theirs = peft.PeftModel.from_pretrained(module, tmp_path)
    batch = Batch(row={"tokens": TOKENS})
    close(model(params, batch), logits_of(theirs))
    assert not torch.allclose(before, logits_of(theirs), atol=1e-2)
    again, read = lora_peft.load(tmp_path, *hf.load(llama(tied)))
    assert_equal_bits(lora.split(read)[1], lora.split(params)[1])
    assert torch.equal(again(read, batch), model(params, batch))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options", [{"use_rslora": True}, {"lora_dropout": 0.3, "init_lora_weights": "gaussian"}], ids=str
)
def test_what_peft_writes_is_loaded_and_gives_equal_logits(tmp_path, tied, options):
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=MODULES, task_type="CAUSAL_LM", **options)
    theirs = peft.get_peft_model(llama(tied), config).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "lora_" in name:
                weight.copy_(random.normal(random.fold_in(random.key(5), name), tuple(weight.shape)) / 3)
    theirs.save_pretrained(tmp_path)
    model, params = lora_peft.load(tmp_path, *hf.load(llama(tied)))
    close(model(params, Batch(row={"tokens": TOKENS})), logits_of(theirs))
    merged, weights = lora.merge(model, params)
    close(merged(weights, Batch(row={"tokens": TOKENS})), logits_of(theirs))
    assert model.layers[1].config.dropout == options.get("lora_dropout", 0.0)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=8, n_head=2, n_layer=2, n_positions=9, attn_implementation="eager"
    )
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize(
    ("targets", "modules"), [(("positions",), ["wpe"]), (("embedding.*", "projection"), ["wpe", "wte", "lm_head"])]
)
def test_tables_of_places_go_both_ways(tmp_path, targets, modules):
    model, params = lora.adapt(*hf.load(gpt2()), lora.LoraConfig(targets, rank=2), random.key(0))
    params = filled(params)
    lora_peft.save(model, params, tmp_path / "ours")
    stored = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert stored["base_model.model.transformer.wpe.lora_embedding_A"].shape == (2, 9)
    theirs = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "ours")
    close(model(params, Batch(row={"tokens": TOKENS})), logits_of(theirs))
    assert not torch.allclose(logits_of(theirs), logits_of(gpt2()), atol=1e-2)

    theirs = peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=modules, task_type="CAUSAL_LM")).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "lora_" in name:
                weight.copy_(random.normal(random.fold_in(random.key(5), name), tuple(weight.shape)) / 3)
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = lora_peft.load(tmp_path / "theirs", *hf.load(gpt2()))
    close(model(params, Batch(row={"tokens": TOKENS})), logits_of(theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_of_16_bits_act_in_32_as_they_merge(written, tmp_path, dtype):
    path = tmp_path / "adapter_model.safetensors"
    load = written(tensors={name: tensor.to(dtype) for name, tensor in load_file(path).items()})
    model, params = load()
    assert {leaf.dtype for leaf in tree.leaves(lora.split(params)[1])} == {torch.float32}
    batch = Batch(row={"tokens": TOKENS})
    theirs = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
    torch.testing.assert_close(model(params, batch), logits_of(theirs), rtol=1e-6, atol=1e-6)
    merged, weights = lora.merge(model, params)
    torch.testing.assert_close(merged(weights, batch), logits_of(theirs), rtol=1e-5, atol=1e-5)


def test_stored_whole_numbers_are_no_adapters(written, tmp_path):
    name = "base_model.model.lm_head.lora_A.weight"
    load = written(tensors={name: torch.ones(3, 16, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=rf"{name} is torch.int32, needs a floating-point dtype"):
        load()


def test_a_file_without_adapters_is_refused(written, tmp_path):
    load = written()
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors holds no adapters"):
        load()


def test_plain_parameters_of_an_adapted_model_are_not_written(tmp_path):
    plain, params = hf.load(llama())
    model, _ = lora.adapt(plain, params, lora.LoraConfig(TARGETS), random.key(0))
    with pytest.raises(ModelError, match="lora: params lacks the adapters 'lora_embedding', 'lora_block0', "):
        lora_peft.save(model, params, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_folders_that_cannot_be_are_named(tmp_path):
    model, params = lora.adapt(*hf.load(llama()), lora.LoraConfig(TARGETS), random.key(0))
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/x", "a\0b"):
        with pytest.raises(CheckpointError, match=r"^adapters .*: cannot be made a folder \(.*\); give another path"):
            lora_peft.save(model, params, folder)
        with pytest.raises(CheckpointError, match=r"^adapters .*adapter_config.json: cannot be read"):
            lora_peft.load(folder, *hf.load(llama()))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"lora_dropout": None}, "lora_dropout is None, it must be at least 0 and below 1"),
        ({"lora_dropout": "0.1"}, "lora_dropout is '0.1', it must be at least 0 and below 1"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0, it must be at least 0 and below 1"),
        ({"r": 2.0}, "r is 2.0, it must be a whole number"),
        ({"r": True}, "r is True, it must be a whole number"),
        ({"r": 0}, "r is 0, it must be at least 1"),
        ({"r": 10**30}, f"r is {10**30}, it must be at most 65536"),
        ({"lora_alpha": "7"}, "lora_alpha is '7', it must be positive and finite"),
        ({"lora_alpha": 0}, "lora_alpha is 0, it must be positive and finite"),
        ({"lora_alpha": 10**400}, f"lora_alpha is 1{59 * '0'}, it must be positive and finite"),
        ({"use_rslora": "no"}, "use_rslora is 'no', it must be True or False"),
        ({"target_modules": 5}, "target_modules is 5, needs names of modules"),
        ({"target_modules": [[1]]}, "target_modules is [[1]], needs names of modules"),
        ({"target_modules": {"q": 1}}, "target_modules is {'q': 1}, needs names of modules"),
    ],
    ids=str,
)
def test_config_fields_of_another_kind(written, tmp_path, fields, text):
    load = written(fields)
    with pytest.raises(CheckpointError) as error:
        load()
    assert str(error.value) == f"adapters {tmp_path / 'adapter_config.json'}: {text}"


@pytest.mark.parametrize("text", ["[" * 200_000, "[1]", "{", '{"r": 1' + 5000 * "0" + "}", "\udcff"], ids=len)
def test_config_files_that_are_no_config(written, tmp_path, text):
    load = written()
    (tmp_path / "adapter_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"^adapters .*adapter_config.json: (cannot be read|holds a list)"):
        load()


def test_a_merged_tied_model_is_exported_untied_and_loads_in_transformers(tmp_path):
    model, params = lora.adapt(*hf.load(llama(tied=True)), lora.LoraConfig(TARGETS), random.key(0))
    params = filled(params)
    merged, weights = lora.merge(model, params)
    untied = hf.from_config({**merged.config, "tie_word_embeddings": False})
    hf.save(untied, weights, tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    close(logits_of(theirs), model(params, Batch(row={"tokens": TOKENS})))


def test_names_of_ones_own_serve_a_model_without_a_config(tmp_path):
    config = decoder.DecoderConfig(vocabulary=9, width=4, layers=1, heads=1, kv_heads=1, head_size=4, mlp_width=4)
    plain, params = decoder.model(config), decoder.init(config, random.key(0))
    model, adapted = lora.adapt(plain, params, lora.LoraConfig(("query", "embedding")), random.key(1))
    names = {"block0.attention.query": "layers.0.q", "embedding": "table"}
    with pytest.raises(ModelError, match="peft: the model has no config that says what its weights are called"):
        lora_peft.save(model, adapted, tmp_path)
    with pytest.raises(ModelError) as error:
        lora_peft.save(model, adapted, tmp_path, names={"embedding": "table"})
    assert str(error.value) == "peft: names lacks 'block0.attention.query', so PEFT has no module for its adapter"
    with pytest.raises(ModelError, match=r"peft: the model has no adapters; lora.adapt makes some"):
        lora_peft.save(plain, params, tmp_path, names=names)
    assert list(tmp_path.iterdir()) == []
    lora_peft.save(model, adapted, tmp_path, names=names)
    _, read = lora_peft.load(tmp_path, plain, params, names=names)
    assert_equal_bits(lora.split(read)[1], lora.split(adapted)[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.fixture
def written(tmp_path):
    """A folder of good adapters, and what changes its config or its tensors."""
    plain, params = hf.load(llama())
    model, adapted = lora.adapt(plain, params, lora.LoraConfig(TARGETS, rank=3), random.key(0))
    lora_peft.save(model, filled(adapted), tmp_path)

    def change(config=None, tensors=None):
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
        path = tmp_path / "adapter_model.safetensors"
        kept = {name: each for name, each in (load_file(path) | (tensors or {})).items() if each is not None}
        save_file(kept, path)

        def load():
            return lora_peft.load(tmp_path, plain, params)

        return load

    return change


def test_config_fields_that_are_not_supported_are_listed(written):
    load = written(
        {
            "peft_type": "IA3", "r": None, "bias": "all", "init_lora_weights": "pissa", "use_dora": True,
            "rank_pattern": {"q_proj": 4}, "modules_to_save": ["lm_head"], "loftq_config": {}, "lora_bias": False,
        }
    )  # fmt: skip
    with pytest.raises(CheckpointError) as error:
        load()
    assert str(error.value).splitlines()[1:] == [
        "  - peft_type is 'IA3', needs 'LORA'",
        "  - r is None, it must be a whole number",
        "  - bias is 'all', supported is 'none'",
        "  - init_lora_weights is 'pissa', which changes the base; supported is one of "
        "(True, False, 'gaussian', 'orthogonal')",
        "  - modules_to_save is ['lm_head'], which is not supported",
        "  - rank_pattern is {'q_proj': 4}, which is not supported",
        "  - use_dora is True, which is not supported",
    ]


def test_tensors_that_do_not_fit_are_listed(written):
    base = "base_model.model."
    query = f"{base}model.layers.0.self_attn.q_proj"
    load = written(
        tensors={
            f"{query}.lora_B.weight": None,
            f"{base}lm_head.lora_A.weight": torch.zeros(4, 16),
            f"{base}lm_head.base_layer.weight": torch.zeros(32, 16),
            f"{base}model.layers.7.self_attn.q_proj.lora_A.weight": torch.zeros(3, 16),
            f"{query}.lora_magnitude_vector": torch.zeros(24),
        }
    )
    with pytest.raises(CheckpointError) as error:
        load()
    assert sorted(str(error.value).splitlines()[1:]) == sorted(
        [
            f"  - {query}.lora_B.weight is missing",
            f"  - {base}lm_head.lora_A.weight has shape (4, 16), needs (3, 16)",
            f"  - {base}lm_head.base_layer.weight differs from head.projection of the parameters, so the adapters are "
            "of another base",
            f"  - {base}model.layers.7.self_attn.q_proj.lora_A.weight is unexpected",
            f"  - {query}.lora_magnitude_vector is unexpected",
        ]
    )


def test_files_that_cannot_be_read_are_named(written, tmp_path):
    load = written()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"adapters .*adapter_model.safetensors: cannot be read"):
        load()
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapters .*adapter_config.json: cannot be read"):
        load()


def test_what_is_meant_for_another_function_is_told_which(tmp_path):
    plain, params = hf.load(llama(tied=True))
    model, adapted = lora.adapt(plain, params, lora.LoraConfig(("head.projection", "*query"), rank=2), random.key(0))
    with pytest.raises(ModelError, match=r"params hold adapters \(lora_block0, .*lora.merge.*lora_peft.save"):
        hf.save(model, adapted, tmp_path)
    with pytest.raises(ModelError, match=r"params hold adapters"):
        hf.save(plain, adapted, tmp_path)
    merged, whole = lora.merge(model, filled(adapted))
    with pytest.raises(ModelError, match=r"a head of their own, the config ties it to the embedding; hf.from_config"):
        hf.save(merged, whole, tmp_path)
    untied = hf.from_config({**plain.config, "tie_word_embeddings": False})
    hf.save(untied, whole, tmp_path)
    batch = Batch(row={"tokens": TOKENS})
    theirs = logits_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert (theirs - model(filled(adapted), batch)).abs().max() < 1e-5
    wrapped = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ModelError, match=r"source is a PeftModel; source.unload\(\) is its base model"):
        hf.load(wrapped)
    assert hf.load(wrapped.unload())[1].keys() == {"embedding", "norm", "block0", "block1", "head"}
