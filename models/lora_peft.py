"""Adapters in PEFT's format, in and out: adapter_config.json and adapter_model.safetensors.

Written from what PEFT 0.21 writes: A and B of a linear module are `lora_A.weight` (rank, inputs) and `lora_B.weight`
(outputs, rank); a table's are transposed, `lora_embedding_A` (rank, rows) and `lora_embedding_B` (width, rank).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import CheckpointError, ModelError
from rpfunc.files import replace_file
from rpfunc.model import Model, Params
from rpfunc.models import checks
from rpfunc.models.hf.pretrained import PretrainedModel, describe
from rpfunc.models.lora import MOST_RANK, AdaptedLayer, LoraConfig, adapters_of, attach
from rpfunc.models.lora_targets import weights

CONFIG, TENSORS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."

HEAD = "lm_head"

LOOK_UPS = ("embedding", "embedding.tokens", "embedding.positions")
"""The paths at which the decoders of `rpfunc.models` look tokens and places up."""

STARTS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that start A and B and leave the base as it is."""

SILENT = (
    *("auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode"),
    *("layers_pattern", "layers_to_transform", "megatron_core", "peft_version", "qalora_group_size", "revision"),
    *("target_modules", "task_type"),
)
"""Fields that do not say how the tensors act, or that others turn on."""


def module_names(model: Model) -> dict[str, str]:
    """Returns the module of transformers that each weight of a pretrained model is, by the weight's path.

    Weights that are only part of a module's (GPT-2's query, key and value), or of a stack of experts, have none.
    Raises ModelError for a model that has no config.

    >>> from rpfunc.models import hf
    >>> sizes = {"vocab_size": 9, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1}
    >>> config = {"model_type": "llama", **sizes, "num_attention_heads": 1, "tie_word_embeddings": True}
    >>> names = module_names(hf.from_config(config))
    >>> names["block0.attention.query"], names["embedding"], names["head.projection"]
    ('model.layers.0.self_attn.q_proj', 'model.embed_tokens', 'lm_head')
    """
    if not isinstance(model, PretrainedModel):
        raise ModelError("peft: the model has no config that says what its weights are called; give their names")
    modules = {
        tuple(map(str, stored.paths[0])): stored.name.removesuffix(".weight")
        for stored in describe(model.config).tables[0]
        if len(stored.paths) == 1 and len(stored.leaf_shapes()[0]) == 2
    }
    names: dict[str, str] = {}
    for layer in model.layers:
        reads = layer.plain.reads if isinstance(layer, AdaptedLayer) else layer.reads
        for place, subtree in zip(tree.paths(reads), tree.leaves(reads), strict=True):
            for (name, *below), module in modules.items():
                if name == subtree:
                    # a tied head is a module of its own, which has the embedding's weight
                    module = HEAD if module in names.values() else module
                    names[".".join(filter(None, (layer.name, place, *below)))] = module
    return names


def save(
    model: Model,
    params: Params,
    folder: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    base: str | None = None,
    look_ups: Collection[str] = LOOK_UPS,
) -> None:
    """Writes the adapters of an adapted model as a folder that PEFT loads.

    names     the module of each adapted weight by its path; None: `module_names(model)`
    base      where PEFT finds the base model
    look_ups  paths of weights that are tables
    Files are written beside their places and renamed. Raises ModelError listing every adapter without a module's name,
    and where the parameters are not the model's; CheckpointError where nothing can be written.
    """
    names = module_names(model) if names is None else names
    configs = [layer.config for layer in model.layers if isinstance(layer, AdaptedLayer)]
    if not configs:
        raise ModelError("peft: the model has no adapters; lora.adapt makes some")
    adapters = adapters_of(model, params)
    unnamed = [f"names lacks {path!r}, so PEFT has no module for its adapter" for path in adapters if path not in names]
    if unnamed:
        raise ModelError.listing("peft", unnamed)
    tensors = {}
    for path, part in adapters.items():
        for name, tensor in _stored(f"{PREFIX}{names[path]}.", part, path in look_ups).items():
            tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "target_modules": sorted(names[path] for path in adapters),
        "r": int(configs[0].rank),
        "lora_alpha": float(configs[0].alpha),
        "lora_dropout": float(configs[0].dropout),
        "use_rslora": configs[0].rank_stabilised,
        "bias": "none",
        "inference_mode": True,
    }
    folder = _path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"adapters {folder}: cannot be made a folder ({error}); give another path") from error
    _write(folder / TENSORS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    _write(folder / CONFIG, lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))


def load(
    folder: str | Path,
    model: Model,
    params: Params,
    *,
    names: Mapping[str, str] | None = None,
    look_ups: Collection[str] = LOOK_UPS,
) -> tuple[Model, dict[str, Any]]:
    """Returns (model, params) with the adapters that PEFT, or `save`, wrote to a folder; see `save`.

    Raises CheckpointError listing every field of the config that is not supported and has a value, and every tensor
    that is missing, unexpected, of another shape, or says otherwise than `params` (PEFT stores adapted tables too).
    """
    folder, names = _path(folder), module_names(model) if names is None else names
    config = _read_config(folder / CONFIG)
    try:
        tensors = load_file(folder / TENSORS)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"adapters {folder / TENSORS}: cannot be read ({error})") from error
    found, adapters, problems = weights(model, params), {}, []
    for path, module in names.items():
        prefix = f"{PREFIX}{module}."
        stored = {name: tensors.pop(name) for name in [*tensors] if name.startswith(prefix)}
        if stored and path not in found:
            problems.append(f"names has {path!r}, which is no weight of the model")
        elif stored:
            weight = found[path].tensor
            problems += _base_problems(path, weight, prefix, stored)
            adapters[path], more = _adapter(weight, prefix, stored, config.rank, path in look_ups)
            problems += more
    problems += [f"{name} is unexpected" for name in sorted(tensors)]
    if not adapters and not problems:
        problems = [f"{TENSORS} holds no adapters"]
    if problems:
        raise CheckpointError.listing(f"adapters {folder}", problems)
    return attach(model, params, adapters, config)


def _base_problems(path: str, weight: Tensor, prefix: str, stored: dict[str, Tensor]) -> list[str]:
    """Takes the base weights that are stored beside an adapter; returns, in words, which are not the parameters'."""
    kept = {name: stored.pop(name) for name in (f"{prefix}base_layer.weight", f"{prefix}weight") if name in stored}
    return [
        f"{name} differs from {path} of the parameters, so the adapters are of another base"
        for name, tensor in kept.items()
        if tensor.shape != weight.shape or not torch.equal(tensor.to(weight), weight)
    ]


def _adapter(
    weight: Tensor, prefix: str, stored: Mapping[str, Tensor], rank: int, look_up: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Returns (A and B of a weight, what is wrong with them in words)."""
    shapes = {"A": (rank, weight.shape[-1]), "B": (weight.shape[-2], rank)}
    blank = {part: torch.empty(shape, device="meta") for part, shape in shapes.items()}
    needed = {name: tuple(tensor.shape) for name, tensor in _stored(prefix, blank, look_up).items()}
    problems = [f"{name} is missing" for name in needed if name not in stored]
    problems += [f"{name} is unexpected" for name in stored if name not in needed]
    problems += [
        f"{name} has shape {tuple(stored[name].shape)}, needs {shape}"
        for name, shape in needed.items()
        if name in stored and tuple(stored[name].shape) != shape
    ]
    if problems:
        return {}, problems
    whole = [name for name in needed if not stored[name].is_floating_point()]
    if whole:
        return {}, [f"{name} is {stored[name].dtype}, needs a floating-point dtype" for name in whole]
    a, b = (stored[name] for name in needed)
    return {"A": b.T, "B": a.T} if look_up else {"A": a, "B": b}, []


def _stored(prefix: str, part: Mapping[str, Tensor], look_up: bool) -> dict[str, Tensor]:
    """Returns PEFT's (A, B) of an adapter, by name."""
    if look_up:
        return {f"{prefix}lora_embedding_A": part["B"].T, f"{prefix}lora_embedding_B": part["A"].T}
    return {f"{prefix}lora_A.weight": part["A"], f"{prefix}lora_B.weight": part["B"]}


def _read_config(path: Path) -> LoraConfig:
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"adapters {path}: cannot be read ({error})") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"adapters {path}: holds a {type(fields).__name__}, needs an object of fields")
    rest = dict(fields)
    kind, rank, alpha = (rest.pop(name, None) for name in ("peft_type", "r", "lora_alpha"))
    dropout, stabilised = rest.pop("lora_dropout", 0.0), rest.pop("use_rslora", False)
    start, bias = rest.pop("init_lora_weights", True), rest.pop("bias", "none")
    problems = [] if kind == "LORA" else [f"peft_type is {kind!r}, needs 'LORA'"]
    targets = rest.get("target_modules") or ["*"]
    targets = [targets] if isinstance(targets, str) else targets
    problems += checks.counts({"r": rank}, most=MOST_RANK)
    problems += checks.positives({"lora_alpha": alpha}) + checks.rates({"lora_dropout": dropout})
    problems += checks.flags({"use_rslora": stabilised})
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        problems.append(f"target_modules is {targets!r:.60}, needs names of modules")
    if bias != "none":
        problems.append(f"bias is {bias!r}, supported is 'none'")
    if start not in STARTS:
        problems.append(f"init_lora_weights is {start!r}, which changes the base; supported is one of {STARTS}")
    problems += [
        f"{name} is {value!r}, which is not supported"
        for name, value in sorted(rest.items())
        if value and name not in SILENT
    ]
    if problems:
        raise CheckpointError.listing(f"adapters {path}", problems)
    return LoraConfig(tuple(targets), rank, alpha, dropout, stabilised)


def _path(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise CheckpointError(f"adapters: the folder is {folder!r:.60}, needs a path")
    return Path(folder)


def _write(path: Path, fill: Callable[[Path], Any]) -> None:
    try:
        replace_file(path, fill)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"adapters {path}: cannot be written ({error})") from error
