"""A model of transformers, trained by rpfunc and by transformers itself: time, peak memory, gradients; and its import.

SmolLM2's shape (hidden 576, 9 heads, 3 key-value heads of size 64, MLP 1536, vocabulary 49,152, head tied to the
embedding) with 8 of its layers and random float32 weights, one sequence of 1,024 tokens. The live module computes
forward and backward with gradient checkpointing and `sdpa` attention; `hf.load` takes that same module, and
`value_and_grad` computes the same gradient from the same memory. They take turns, and medians are compared.
Peaks are exact live bytes less the bytes of all gradients. Imports are of a 1 GB checkpoint, each in a process of its
own: what its anonymous memory grows by, at most, after all imports of modules. `--quick`: one turn, 0.1 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from rpfunc import Batch, memory, random, tree, value_and_grad
from rpfunc.models import hf
from rpfunc.models.hf.pretrained import describe
from rpfunc.objectives import sft

MIB = 2**20
NUM_ROWS = 1024
SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
HOW: dict[str, Any] = {"chunk": 384, "head_chunk": 128, "keep_attention": 1.0}
"""How rpfunc works: matters of time and memory alone."""


def build_module() -> Any:
    config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa")
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    module.config.use_cache = False
    module.gradient_checkpointing_enable()
    return module


def make_tokens() -> torch.Tensor:
    return (random.uniform(random.key(1), (1, NUM_ROWS)) * SIZES["vocab_size"]).long()


def with_transformers(module: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad(set_to_none=True)
    module(input_ids=tokens, labels=tokens).loss.backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def with_rpfunc(tokens: torch.Tensor, model: Any, params: Any) -> Any:
    batch = Batch(row={"tokens": tokens, "labels": tokens})
    return value_and_grad(model, sft(), **HOW)(params, batch)[1]


def worst_difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Returns the largest relative error of a parameter's gradient, as in docs/exactness.md."""
    norms = {name: grad.norm() for name, grad in wanted.items()}
    floor = 1e-3 * torch.stack([*norms.values()]).square().mean().sqrt()
    return max(float((found[name] - wanted[name]).norm() / (norms[name] + floor)) for name in wanted)


def gradients(turns: int) -> dict[str, Any]:
    """Returns figures of the gradient: of both ways, and rpfunc's over transformers'."""
    module, tokens = build_module(), make_tokens()
    model, params = hf.load(module)
    grad_bytes = sum(leaf.nbytes for leaf in tree.leaves(params))
    ways: dict[str, Callable[[], Any]] = {
        "transformers": lambda: with_transformers(module, tokens),
        "rpfunc": lambda: with_rpfunc(tokens, model, params),
    }
    module.zero_grad(set_to_none=True)
    peaks, found = {}, {}
    for name, way in ways.items():  # these runs warm up, too
        module.zero_grad(set_to_none=True)
        peak = memory.peak(way)
        peaks[name], found[name] = (peak.peak_bytes - grad_bytes) / MIB, peak.result
    hf.write_grads(module, found["rpfunc"])
    written = {name: parameter.grad for name, parameter in module.named_parameters()}
    error = worst_difference(written, found["transformers"])
    del found, written, peak

    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            module.zero_grad(set_to_none=True)
            began = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - began)
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "time_ratio": seconds["rpfunc"] / seconds["transformers"],
        "peak_ratio": peaks["rpfunc"] / peaks["transformers"],
        "difference": error,
        "seconds": seconds,
        "peak_mib": peaks,
    }


def write_checkpoint(folder: Path, num_bytes: int) -> int:
    """Writes a Llama folder of about `num_bytes`; returns the file's size."""
    width = 1024
    layers = round(num_bytes / (12 * width * width * 4))
    sizes = {"hidden_size": width, "intermediate_size": 8 * width // 3, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000, "tie_word_embeddings": True}
    config = {"model_type": "llama", **sizes, **heads, "dtype": "float32"}
    (table,) = describe(config).tables
    save_file({each.name: torch.ones(each.shape) for each in table}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return (folder / "model.safetensors").stat().st_size


def imports(num_bytes: int) -> dict[str, Any]:
    """Returns the growth of anonymous memory over the file's size, of both ways to import it."""
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder), num_bytes)
        gc.collect()
        grown = {}
        for how in ("copied", "mapped"):
            command = [sys.executable, str(Path(__file__).with_name("import_memory.py")), folder, how]
            grown[how] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {
        "import_bytes": size,
        "import_copied_ratio": grown["copied"] / size,
        "import_mapped_ratio": grown["mapped"] / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="one turn, and a checkpoint of 0.1 GB")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers names its own methods in two ways
    summary = gradients(1 if options.quick else 7) | imports(10**8 if options.quick else 10**9)
    for name, value in summary.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}", flush=True)
    if options.json:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
