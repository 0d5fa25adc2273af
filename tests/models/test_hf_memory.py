"""What an import adds to the process's own memory: next to nothing where it maps the file, else the file once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

CONFIG = {
    "model_type": "llama", "vocab_size": 2000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 12, "num_key_value_heads": 4, "dtype": "float32",
}  # fmt: skip

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "import_memory.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from rpfunc.models.hf.pretrained import describe

    written = tmp_path_factory.mktemp("large")
    (table,) = describe(CONFIG).tables
    save_file({each.name: torch.ones(each.shape) for each in table}, written / "model.safetensors")
    (written / "config.json").write_text(json.dumps(CONFIG))
    return written


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="own and mapped memory are told apart by Linux only")
@pytest.mark.parametrize(("how", "least", "most"), [("mapped", 0.0, 0.1), ("copied", 0.9, 1.2)])
def test_memory_of_an_import(folder, how, least, most):
    size = (folder / "model.safetensors").stat().st_size
    command = [sys.executable, str(PROGRAM), str(folder), how]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    # copied, at least once: the measure sees what it should
    assert least * size <= int(found.stdout) <= most * size
