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

PROGRAM = """
import sys, threading, torch
from pathlib import Path
from rpfunc import tree
from rpfunc.models import hf

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

peak, ended = 0, threading.Event()

def watch():
    global peak
    while not ended.wait(0.001):
        peak = max(peak, own())

before = own()
watcher = threading.Thread(target=watch)
watcher.start()
model, params = hf.load(sys.argv[1], mapped=sys.argv[2] == "mapped")
if sys.argv[3] == "read":  # every page of the file
    total = sum(float(leaf.sum()) for leaf in tree.leaves(params))
ended.set()
watcher.join()
print(max(peak, own()) - before)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from rpfunc.models.hf.pretrained import describe

    written = tmp_path_factory.mktemp("large")
    (table,) = describe(CONFIG).tables
    save_file({each.name: torch.ones(each.shape) for each in table}, written / "model.safetensors")
    (written / "config.json").write_text(json.dumps(CONFIG))
    return written


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="own and mapped memory are told apart by Linux only")
@pytest.mark.parametrize(("how", "use", "most"), [("mapped", "read", 0.1), ("copied", "only", 1.2)])
def test_memory_of_an_import(folder, how, use, most):
    size = (folder / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", PROGRAM, str(folder), how, use]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    assert int(found.stdout) <= most * size
    if how == "copied":  # the measure sees what it should
        assert int(found.stdout) >= 0.9 * size
