"""Checkpoint folders: config.json and safetensors files, with an index where there are several."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rpfunc.errors import CheckpointError
from rpfunc.files import replace_file

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def read_config(folder: Path) -> dict[str, Any]:
    """Returns what config.json says."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {folder}: has no {CONFIG}; a model folder is needed") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path}: cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"checkpoint {path}: holds a {type(config).__name__}, needs an object of fields")
    return config


def read_tensors(folder: Path, *, mapped: bool) -> dict[str, Tensor]:
    """Returns the checkpoint's tensors by name: memory-mapped, or read into memory."""
    found: dict[str, Tensor] = {}
    for name, names in _files(folder).items():
        path = folder / name
        try:
            with safe_open(path, framework="pt") as file:
                held = set(file.keys())
                if names is not None and held != names:
                    problems = [f"{each} is not in {name}, the index says it is" for each in sorted(names - held)]
                    problems += [f"{each} is in {name}, the index does not say so" for each in sorted(held - names)]
                    raise CheckpointError.listing(f"checkpoint {folder}", problems)
                for each in sorted(held):
                    tensor = file.get_tensor(each)
                    found[each] = tensor if mapped else tensor.clone()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"checkpoint {path}: is cut short or no safetensors file ({error})") from error
    return found


def _files(folder: Path) -> dict[str, set[str] | None]:
    """Returns the folder's weight files, each with the names that an index gives it."""
    if (folder / SINGLE).exists():
        return {SINGLE: None}
    if not (folder / INDEX).exists():
        other = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5"))
        hint = f"; {', '.join(other)} may run code or is of another format, and is never read" if other else ""
        raise CheckpointError(f"checkpoint {folder}: has neither {SINGLE} nor {INDEX}{hint}")
    try:
        places = json.loads((folder / INDEX).read_text())["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder / INDEX}: is no index of weights ({error!r})") from error
    files: dict[str, set[str] | None] = {}
    for name, file in places:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"checkpoint {folder / INDEX}: names {file!r}, needs safetensors files beside it")
        (files.setdefault(file, set()) or files[file]).add(name)  # type: ignore[union-attr]
    missing = [f"{file} is missing, the index names it" for file in sorted(files) if not (folder / file).exists()]
    if missing:
        raise CheckpointError.listing(f"checkpoint {folder}", missing)
    return files


class Pending(NamedTuple):
    """A tensor to be written: its size is known before it is made."""

    name: str
    num_bytes: int
    make: Callable[[], Tensor]


def write(folder: Path, config: Mapping[str, Any], tensors: Iterable[Pending], shard_bytes: int) -> None:
    """Writes a checkpoint; each file beside its place, then renamed. Holds one file's tensors at a time.

    Raises CheckpointError where a file cannot be written; what is in the way is found before any is.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = [path for path in folder.iterdir() if path.name == CONFIG or _SHARD.fullmatch(path.name)]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: cannot be written ({error})") from error
    problems = [f"{path.name} is a folder, where a file belongs; move it away" for path in before if path.is_dir()]
    if problems:
        raise CheckpointError.listing(f"checkpoint {folder}", sorted(problems))
    shards: list[list[Pending]] = [[]]
    for pending in tensors:
        if shards[-1] and sum(each.num_bytes for each in shards[-1]) + pending.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(pending)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = [SINGLE] if len(shards) == 1 else names
    for name, shard in zip(names, shards, strict=True):
        held = {pending.name: _alone(pending.make()) for pending in shard}
        _write(folder / name, partial(save_file, held, metadata={"format": "pt"}))
        del held
    written = {*names}
    if len(shards) > 1:
        total = sum(pending.num_bytes for shard in shards for pending in shard)
        places = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
        written.add(INDEX)
    _write_json(folder / CONFIG, config)
    for path in before:  # readers would take them for this checkpoint's
        if path.name not in {CONFIG, *written}:
            path.unlink(missing_ok=True)


def _alone(tensor: Tensor) -> Tensor:
    """Returns the tensor, contiguous and on the CPU, in memory that holds nothing else."""
    tensor = tensor.detach().cpu()
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    _write(path, lambda beside: beside.write_text(text))


def _write(path: Path, fill: Callable[[Path], Any]) -> None:
    try:
        replace_file(path, fill)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint {path}: cannot be written ({error})") from error
