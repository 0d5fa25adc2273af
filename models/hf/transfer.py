"""Models of transformers in and out: folders and live modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import ModelError
from rpfunc.model import Model, Params
from rpfunc.models.families import FAMILIES
from rpfunc.models.hf import files
from rpfunc.models.hf.convert import check_params, choose_table, leaves_of, to_params
from rpfunc.models.hf.gguf import read_module
from rpfunc.models.hf.pretrained import PretrainedModel, describe


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
    Raises CheckpointError listing all missing, unexpected, wrongly shaped and contradictory tensors; ModelError listing
    all config fields that are unknown or not supported.
    """
    if not isinstance(source, torch.nn.Module) and Path(source).suffix == ".gguf":
        source = read_module(Path(source), dtype or torch.float32)
    live = isinstance(source, torch.nn.Module)
    folder = None if live else Path(source)
    config = files.read_config(folder) if folder is not None else source.config.to_dict()
    description = describe(config, ignore)
    if folder is not None:
        tensors = files.read_tensors(folder, mapped=mapped)
        subject = f"checkpoint {folder}"
    else:
        tensors = {name: tensor.detach() for name, tensor in source.state_dict(keep_vars=True).items()}
        subject = f"module {type(source).__name__}"
    params = to_params(FAMILIES[config["model_type"]], description.tables, tensors, subject)
    del tensors

    def finish(leaf: Tensor) -> Tensor:
        leaf = leaf if dtype is None else leaf.to(dtype)
        return leaf if live else leaf.contiguous()

    return PretrainedModel(description.layers, config), tree.map(finish, params)


def save(model: Model, params: Params, folder: str | Path, *, shard_bytes: int = 5 * 10**9) -> None:
    """Writes a folder that transformers, and `load`, read: the model's config and its parameters as they are.

    Files are written beside their places and renamed. Needs memory for one file of `shard_bytes` at most.
    Raises ModelError listing every leaf that the config does not ask for, or asks for otherwise; CheckpointError where
    a file cannot be written.
    """
    if not isinstance(model, PretrainedModel):
        raise ModelError(
            f"save: model is a {type(model).__name__}, needs a PretrainedModel, as load and from_config give"
        )
    table = describe(model.config, model.config.keys()).tables[0]
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
    can be. Where gradients are None (frozen), so is `.grad`.
    Raises ModelError listing leaves that do not fit, before anything is written.
    """
    config = module.config.to_dict()  # type: ignore[union-attr, operator]
    parameters = dict(module.named_parameters())
    tables = describe(config, config.keys()).tables
    table, names = choose_table(FAMILIES[config["model_type"]], tables, set(parameters))
    check_params(table, grads, may_lack=True)
    for stored in table:
        parameter, leaves = parameters[names[stored.name]], leaves_of(stored, grads)
        if all(leaf is None for leaf in leaves):
            parameter.grad = None
            continue
        whole = [
            torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
            if leaf is None
            else leaf.to(parameter.device, parameter.dtype)
            for leaf, shape in zip(leaves, stored.leaf_shapes(), strict=True)
        ]
        parameter.grad = stored.tensor(whole)
