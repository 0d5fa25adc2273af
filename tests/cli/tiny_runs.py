"""The smallest runs of the command line, and what is read from their folders."""

import json

from safetensors import safe_open
from safetensors.torch import load_file

TINY = """
steps = 6
evaluate_every = 3
checkpoint_every = 1
sample_tokens = 12
[model]
width = 8
layers = 1
heads = 2
kv_heads = 1
head_size = 4
mlp_width = 8
dropout = 0.1
[data]
text = "text.txt"
examples = 3
rows = 8
[execution]
workers = 2
microbatches = 2
"""


def write_files(folder):
    (folder / "text.txt").write_text("In the beginning God created the heaven and the earth. " * 10)
    (folder / "tiny.toml").write_text(TINY)


def metrics(run):
    dropped = ("tokens_per_s", "bubble")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name not in dropped} for record in records]


def saved(run):
    tensors = load_file(run / "checkpoint.safetensors")
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def steps_done(run):
    with safe_open(run / "checkpoint.safetensors", framework="pt") as file:
        return int(file.metadata()["step"])


def tree_of(folder):
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
