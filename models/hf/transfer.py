"""Models of transformers in and out: folders and live modules."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import CheckpointError, ModelError, OptionsError
from rpfunc.model import Model, Params
from rpfunc.models.families import FAMILIES, Table
from rpfunc.models.hf import files
from rpfunc.models.hf.convert import COMPUTED, check_one_dtype, check_params, choose_table, leaves_of, to_params
from rpfunc.models.hf.gguf import read_module
from rpfunc.models.hf.pretrained import PretrainedModel, describe
from rpfunc.models.lora import PREFIX as ADAPTERS


def load(
    source: Any, *, dtype: torch.dtype | None = None, mapped: bool = True, ignore: Collection[str] = ()
) -> tuple[PretrainedModel, dict[str, Any]]:
    """Returns (model, parameters) of a checkpoint folder, a GGUF file, or a live module of transformers.

    A folder: config.json and safetensors files; nothing else is read, no code is run. Parameters have the dtypes of
    the file, or `dtype`. Mapped, those that are stored as the model wants them are views of the file, read when used,
    and the others are copied (the weights of GPT-2 and GPT-OSS's experts are stored the other way round); without
    `mapped` all are in memory of their own.
    A GGUF file (a path that ends so): transformers reads it, and its numbers are widened to `dtype`, or float32.
    A module: parameters share its memory, without copies (unless `dtype` differs), and so follow its optimizer.
    Give `optim` a clone of what it should be allowed to overwrite.
    ignore  config fields not to look at, where you know that they say nothing
    Raises CheckpointError listing all missing, unexpected, wrongly shaped and contradictory tensors, or for dtypes that
    one layer cannot compute with; ModelError listing all config fields that are unknown or not supported.
    """
    _check_dtype(dtype)
    source = _unwrapped(source)
    if hasattr(source, "peft_config") and hasattr(source, "merge_and_unload"):
        raise ModelError(
            f"load: source is a {type(source).__name__}; source.unload() is its base model, and lora_peft.load puts "
            "the adapters on it that source.save_pretrained wrote; source.merge_and_unload() has them merged"
        )
    if not isinstance(source, str | os.PathLike | torch.nn.Module):
        raise ModelError(f"load: source is a {type(source).__name__}, needs a folder, a GGUF file or a live module")
    if not isinstance(source, torch.nn.Module) and Path(source).suffix == ".gguf":
        source = read_module(Path(source), dtype or torch.float32)
    live = isinstance(source, torch.nn.Module)
    folder = None if live else Path(source)
    config = files.read_config(folder) if folder is not None else _config(source)
    description = describe(config, ignore)
    if folder is not None:
        tensors = files.read_tensors(folder, mapped=mapped)
        subject = f"checkpoint {folder}"
    else:
        tensors = {name: tensor.detach() for name, tensor in source.state_dict(keep_vars=True).items()}
        subject = f"module {type(source).__name__}"
    params = to_params(FAMILIES[config["model_type"]], description.tables, tensors, subject)
    del tensors
    if dtype is None:
        check_one_dtype(params, subject)

    def finish(leaf: Tensor) -> Tensor:
        leaf = leaf if dtype is None else leaf.to(dtype)
        return leaf if live else leaf.contiguous()

    return PretrainedModel(description.layers, config), tree.map(finish, params)


def save(model: Model, params: Params, folder: str | Path, *, shard_bytes: int = 5 * 10**9) -> None:
    """Writes a folder that transformers, and `load`, read: the model's config and its parameters as they are.

    Files are written beside their places and renamed. Needs memory for one file of `shard_bytes` at most.
    Raises ModelError listing every leaf that the config does not ask for, or asks for otherwise, or that has no
    floating-point numbers; CheckpointError where a file cannot be written.
    """
    if not isinstance(folder, str | os.PathLike):
        raise CheckpointError(f"save: folder is a {type(folder).__name__}, needs a path")
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int | float):
        raise OptionsError(f"save: shard_bytes is {shard_bytes!r}, needs a number of bytes")
    if not isinstance(model, PretrainedModel):
        raise ModelError(
            f"save: model is a {type(model).__name__}, needs a PretrainedModel, as load and from_config give"
        )
    table = describe(model.config, model.config.keys()).tables[0]
    adapters = [name for name in params if name.startswith(ADAPTERS)] if isinstance(params, Mapping) else []
    if adapters:
        raise ModelError(
            f"save: params hold adapters ({', '.join(adapters)}); save lora.merge(model, params), or the adapters "
            "alone by lora_peft.save"
        )
    if isinstance(params, Mapping) and "head" in params and not any(("head",) in stored.paths for stored in table):
        raise ModelError(
            "save: params have a head of their own, the config ties it to the embedding; "
            'hf.from_config({**model.config, "tie_word_embeddings": False}) in place of the model would do'
        )
    check_params(table, params)
    pending = []
    for stored in table:
        leaves = leaves_of(stored, params)
        num_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        pending.append(files.Pending(stored.name, num_bytes, partial(stored.tensor, leaves)))
    dtypes = {str(leaf.dtype).removeprefix("torch.") for leaf in tree.leaves(dict(params))}
    config = dict(model.config)
    if len(dtypes) == 1:
        config.pop("torch_dtype", None)
        config["dtype"] = dtypes.pop()
    files.write(Path(folder), config, pending, shard_bytes)


def write_grads(module: torch.nn.Module, grads: Mapping[str, Any]) -> None:
    """Puts gradients, as `value_and_grad` gives them for `load(module)`, into `.grad` of the module's parameters.

    In each parameter's dtype and on its device, in place of what was there; the memory of `grads` is shared where that
    can be. Where gradients are None (frozen), so is `.grad`; also where a parameter's `requires_grad` is False, so that
    no optimizer trains it. A compiled module is written to through the module it was made from.
    Raises ModelError listing leaves, and parameters of the module, that do not fit, before anything is written.
    """
    module = _unwrapped(module)
    config = _config(module)
    parameters = dict(module.named_parameters())
    tables = describe(config, config.keys()).tables
    table, names = choose_table(FAMILIES[config["model_type"]], tables, set(parameters))
    _check_module(module, table, {name: parameters[stored] for name, stored in names.items()})
    check_params(table, grads, may_be_none=True)
    for stored in table:
        parameter, leaves = parameters[names[stored.name]], leaves_of(stored, grads)
        if not parameter.requires_grad or all(leaf is None for leaf in leaves):
            parameter.grad = None
            continue
        whole = [
            torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
            if leaf is None
            else leaf.to(parameter.device, parameter.dtype)
            for leaf, shape in zip(leaves, stored.leaf_shapes(), strict=True)
        ]
        parameter.grad = stored.tensor(whole)


def _check_dtype(dtype: Any) -> None:
    """Raises OptionsError for a dtype that parameters cannot have."""
    if dtype is None or dtype in COMPUTED:
        return
    named = isinstance(dtype, str) and getattr(torch, dtype, None) in COMPUTED
    needed = f"needs the dtype torch.{dtype}" if named else f"needs one of {', '.join(map(str, COMPUTED))}"
    raise OptionsError(f"load: dtype is {dtype!r}, {needed}")


def _unwrapped(source: Any) -> Any:
    """Returns the module that torch.compile was given, or else `source`."""
    return getattr(source, "_orig_mod", source) if isinstance(source, torch.nn.Module) else source


def _config(module: Any) -> dict[str, Any]:
    """Returns the config of a module. Raises ModelError if it has none, and so is no module of transformers."""
    if not callable(getattr(getattr(module, "config", None), "to_dict", None)):
        inner = getattr(module, "module", None)
        hint = f"; give the {type(inner).__name__} in its `module`" if isinstance(inner, torch.nn.Module) else ""
        raise ModelError(f"module: a {type(module).__name__} has no config as transformers' models have{hint}")
    config: dict[str, Any] = module.config.to_dict()
    return config


def _check_module(module: torch.nn.Module, table: Table, parameters: Mapping[str, Tensor]) -> None:
    """Raises ModelError listing how a module's parameters differ from what its config says."""
    needed = {stored.name: stored.shape for stored in table}
    problems = [f"has no parameter {name} of its own" for name in needed.keys() - parameters.keys()]
    problems += [f"has a parameter {name} that its config does not know" for name in parameters.keys() - needed.keys()]
    problems += [
        f"parameter {name} has shape {tuple(parameters[name].shape)}, its config needs {needed[name]}"
        for name in needed.keys() & parameters.keys()
        if tuple(parameters[name].shape) != needed[name]
    ]
    if problems:
        raise ModelError.listing(f"module {type(module).__name__}: does not fit its config", sorted(problems))
