"""`rpfunc train` on a pretrained model: what is trained, saved, continued and handed back to transformers."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import module, transformers

from rpfunc import Batch, tree
from rpfunc.cli import main
from rpfunc.models import hf, lora
from rpfunc.testing.oracles import assert_equal_bits
from rpfunc.train import checkpoint
from rpfunc.train.folder import RunFolder
from rpfunc.train.loop import prepare

TEXT = "In the beginning God created the heaven and the earth. " * 20
VOCABULARY = 280

FULL = """
pretrained = "base"
steps = 6
evaluate_every = 3
checkpoint_every = 1
sample_tokens = 5
[data]
text = "text.txt"
examples = 3
rows = 8
[optimizer]
learning_rate = 0.02
warmup = 2
[execution]
workers = 2
microbatches = 2
chunk = 4
head_chunk = 2
"""
ADAPTERS = '[lora]\ntargets = ["attention.*"]\nrank = 2\nalpha = 4.0\ndropout = 0.1\n'


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama and a tokenizer of bytes and pairs, as transformers writes them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    )
    folder = tmp_path_factory.mktemp("pretrained") / "base"
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(made), hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=None,
    )  # fmt: skip
    module(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(base, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "base").symlink_to(base)
    (tmp_path / "full.toml").write_text(FULL)
    (tmp_path / "lora.toml").write_text(FULL + ADAPTERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*arguments):
    assert main(["train", *map(str, arguments)]) == 0


def held_out(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["held_out_bits_per_byte"] for record in records if "held_out_bits_per_byte" in record]


def trained(run):
    """Returns (model, parameters) at the end of a run, from its checkpoint."""
    setting = prepare(RunFolder(run).read_options())
    state = checkpoint.load(run / "checkpoint.safetensors", setting.initial_state(), frozen=setting.start.frozen)
    return setting.start.model, state.params


def logits_of(folder, tokens):
    with torch.no_grad():
        made = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        return made(input_ids=tokens).logits


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_loss_falls_and_transformers_loads_what_was_trained(folder, kind):
    base = {path.name: path.read_bytes() for path in (folder / "base").iterdir()}
    train(f"{kind}.toml", "--out", "run", "--steps", "20")
    losses = held_out(folder / "run")
    assert losses[-1] < losses[0] - 0.1
    model, params = trained(folder / "run")
    tokens = torch.tensor([[5, 270, 9, 3, 100]])
    found = logits_of(folder / "run" / "model", tokens)
    assert (model(params, Batch(row={"tokens": tokens})) - found).abs().max() <= 1e-5
    assert (found - logits_of(folder / "base", tokens)).abs().max() > 1e-2
    tokenizers = [hf.load_tokenizer(folder / place) for place in ("run/model", "base")]
    assert tokenizers[0](TEXT)["input_ids"] == tokenizers[1](TEXT)["input_ids"]
    assert (folder / "run" / "sample.txt").read_text().startswith("In the beginning")
    assert {path.name: path.read_bytes() for path in (folder / "base").iterdir()} == base


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_continued_run_has_the_bits_of_a_straight_one(folder, kind, monkeypatch):
    train(f"{kind}.toml", "--out", "straight")
    from rpfunc.cli import train as command

    with monkeypatch.context() as patched:  # stops as Ctrl-C does, after three steps
        run = command.run
        patched.setattr(
            command, "run", lambda setting, state, place, report, stop: run(
                setting, state, place, report, lambda: len(place.metrics.read_text().splitlines()) > 3
            )
        )  # fmt: skip
        assert main(["train", f"{kind}.toml", "--out", "broken"]) == command.INTERRUPTED
    with safe_open(folder / "broken" / "checkpoint.safetensors", framework="pt") as file:
        assert file.metadata()["step"] == "3"
    train("--resume", "broken")
    saved = [load_file(folder / run / "checkpoint.safetensors") for run in ("broken", "straight")]
    assert_equal_bits(*saved)
    assert held_out(folder / "broken") == held_out(folder / "straight")


def test_adapters_alone_have_gradients_optimizer_state_and_checkpoints(folder):
    train("lora.toml", "--out", "run")
    _, params = trained(folder / "run")
    base, adapters = lora.split(params)
    held = load_file(folder / "run" / "checkpoint.safetensors")
    assert {name for name in held if name.startswith("params.")} == {f"params.{path}" for path in tree.paths(adapters)}
    size = sum(leaf.numel() for leaf in tree.leaves(adapters))
    assert sum(leaf.numel() for leaf in held.values()) < 3 * size + 10  # with both moments
    assert_equal_bits(base, hf.load(folder / "base")[1])
    assert all(bool(part["B"].any()) for layer in adapters.values() for part in layer.values())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own
def test_peft_loads_the_adapters(folder):
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'rpfunc[peft]'")
    train("lora.toml", "--out", "run")
    tokens = torch.tensor([[5, 270, 9, 3, 100]])
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    with torch.no_grad():
        found = peft.PeftModel.from_pretrained(plain, folder / "run" / "adapters").eval()(input_ids=tokens).logits
    assert (found - logits_of(folder / "run" / "model", tokens)).abs().max() <= 1e-5


def test_a_head_that_adapters_untie_is_exported_untied(folder):
    train("lora.toml", "--out", "run", "--lora.targets", "projection")
    model, params = trained(folder / "run")
    tokens = torch.tensor([[5, 270, 9]])
    exported = logits_of(folder / "run" / "model", tokens)
    assert (model(params, Batch(row={"tokens": tokens})) - exported).abs().max() <= 1e-5


def test_sample_goes_on_in_the_tokenizers_words(folder, capsys):
    train("full.toml", "--out", "run", "--steps", "1")
    capsys.readouterr()
    arguments = ["sample", "run", "--prompt", "In the", "--length", "20", "--temperature", "0"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("In the")


BAD = {
    "no such folder": (["--pretrained", "none"], "tokenizer ", "there is no such file or folder"),
    "no such package": (["--pretrained", "package:no_such"], "package no_such: is not installed", "--no-deps no-such"),
    "a shape beside it": (["--model.width", "16"], "model is given and pretrained is", "which has a shape of its own"),
    "adapters on nothing": (
        ["--lora.targets", "attention.*", "--pretrained", ""],
        "lora is given without pretrained",
        "adapters stand on trained weights",
    ),
    "a target of nothing": (["--lora.targets", "querry"], "target 'querry' matches no leaf", "query"),
    "a plan of another model": (["--execution.plan", "F0:1 X1:9 B0:1"], "the model has 4 layers", ""),
    "a head chunk of nothing": (["--execution.head-chunk", "0"], "execution.head-chunk is 0", "at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_refused_before_anything_is_written(folder, case, capsys):
    arguments, *texts = BAD[case]
    before = sorted(path.name for path in folder.iterdir())
    assert main(["train", "full.toml", *arguments]) == 2
    errors = capsys.readouterr().err
    assert all(text in errors for text in texts), errors
    assert sorted(path.name for path in folder.iterdir()) == before


def test_text_that_is_not_utf_8_is_refused(folder, capsys):
    (folder / "text.txt").write_bytes(b"\xff" * 500)
    assert main(["train", "full.toml"]) == 2
    assert "is not UTF-8, which the model's tokenizer reads" in capsys.readouterr().err


def test_code_of_a_folder_is_never_run(folder, base, tmp_path_factory, capsys):
    other = tmp_path_factory.mktemp("code") / "base"
    other.mkdir()
    for path in base.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "evil.py").write_text(f"open({str(other / 'ran')!r}, 'w')\n")
    fields = json.loads((other / "tokenizer_config.json").read_text())
    fields |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (other / "tokenizer_config.json").write_text(json.dumps(fields))
    main(["train", "full.toml", "--pretrained", str(other), "--steps", "1"])
    capsys.readouterr()
    assert not (other / "ran").exists()
