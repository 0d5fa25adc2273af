"""Between a checkpoint's tensors and a model's parameters, by a family's table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import CheckpointError, ModelError
from rpfunc.models.families import Family, Stored, Table, build

EMBEDDING, HEAD = ("embedding",), "lm_head.weight"

COMPUTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What parameters may be: floating-point numbers that a layer computes with."""


def choose_table(family: Family, tables: Sequence[Table], names: set[str]) -> tuple[Table, dict[str, str]]:
    """Returns the way of storing that these names fit best, and the stored name of each tensor that is a parameter."""
    bare = not any(name.startswith(family.prefix) for name in names)
    stored = {
        (family.prefix + name if bare and name != HEAD else name): name
        for name in names
        if not re.fullmatch(family.buffers, name)
    }
    return min(tables, key=lambda table: len({each.name for each in table} ^ stored.keys())), stored


def to_params(family: Family, tables: Sequence[Table], tensors: Mapping[str, Tensor], subject: str) -> dict[str, Any]:
    """Returns the parameters that `tensors` hold, as views of them.

    Raises CheckpointError listing all tensors that are missing, unexpected, of another shape, no floating-point
    numbers, or that contradict what the config says.
    """
    table, stored = choose_table(family, tables, set(tensors))
    expected = {each.name: each for each in table}
    problems = [f"{name} is missing" for name in expected if name not in stored]
    (embedding,) = (each.name for each in table if each.paths == (EMBEDDING,))
    tied = HEAD not in expected and HEAD in stored and embedding in stored
    # a tied head may be stored all the same, as the embedding once more
    if tied and not _equal(tensors[stored.pop(HEAD)], tensors[stored[embedding]]):
        problems.append(
            f"{HEAD} differs from {embedding}, the config says they are one (tie_word_embeddings is true); set it to "
            "false to keep both, or leave one of them out"
        )
    problems += [f"{stored[name]} is unexpected" for name in sorted(stored.keys() - expected.keys())]
    leaves: dict[tuple[str | int, ...], Tensor] = {}
    for name in expected.keys() & stored.keys():
        tensor, needed = tensors[stored[name]], expected[name].shape
        if tuple(tensor.shape) != needed:
            problems.append(f"{stored[name]} has shape {tuple(tensor.shape)}, the config needs {needed}")
        elif tensor.dtype not in COMPUTED:
            problems.append(f"{stored[name]} is {tensor.dtype}, {_needed(tensor.dtype)}")
        else:
            leaves.update(zip(expected[name].paths, expected[name].leaves(tensor), strict=True))
    if problems:
        raise CheckpointError.listing(subject, sorted(problems))
    params: dict[str, Any] = build(leaves)
    return params


def check_one_dtype(params: Mapping[str, Any], subject: str) -> None:
    """Raises CheckpointError where leaves that are multiplied with each other differ in dtype; norms may be wider."""
    held: dict[torch.dtype, list[str]] = {}
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        if not any(part in NORMS for part in path.split(".")):
            held.setdefault(leaf.dtype, []).append(path)
    if len(held) > 1:
        shown = [f"{len(paths)} leaves are {dtype}, {paths[0]} among them" for dtype, paths in held.items()]
        raise CheckpointError.listing(
            f"{subject}: one layer cannot compute with several dtypes (only norms may be wider); give one, as in "
            "load(..., dtype=torch.float32)",
            sorted(shown),
        )


NORMS = ("norm", "norm_after", "query_norm", "key_norm")
"""Parts of a leaf's path that say that it is a norm's."""


def check_params(table: Table, params: Any, *, may_be_none: bool = False) -> None:
    """Raises ModelError listing every leaf that is missing, unexpected, of another shape or of other numbers.

    may_be_none  leaves, and whole subtrees, may be None; left out they are missing all the same
    """
    subject = "params or gradients do not fit the config"
    if not isinstance(params, Mapping):
        raise ModelError(f"{subject}: they are a {type(params).__name__}, a dict as load gives is needed")
    found = dict(zip(tree.paths(dict(params)), tree.leaves(dict(params)), strict=True))
    problems, needed = [], set()
    for path, shape in (each for stored in table for each in zip(stored.paths, stored.leaf_shapes(), strict=True)):
        name = _dotted(path)
        needed.add(name)
        if name in found:
            problems += [f"leaf {name} {problem}" for problem in _misfits(found[name], shape)]
        elif not (may_be_none and _is_none(params, path)):
            problems.append(f"leaf {name} is missing")
    problems += [f"leaf {name} is unexpected" for name in found.keys() - needed]
    if problems:
        raise ModelError.listing(subject, sorted(problems))


def leaves_of(stored: Stored, params: Mapping[str, Any]) -> list[Any]:
    """Returns the leaves that a stored tensor holds, None where `params`, checked before, has None."""
    return [_below(params, path) for path in stored.paths]


def _below(params: Any, path: tuple[str | int, ...]) -> Any:
    """Returns what lies at the path: None where that, or something above it, is None."""
    for step in path:
        params = None if params is None else params[step]
    return params


def _is_none(params: Any, path: tuple[str | int, ...]) -> bool:
    try:
        return _below(params, path) is None
    except (KeyError, IndexError, TypeError):
        return False


def _misfits(leaf: Any, shape: tuple[int, ...]) -> list[str]:
    if not isinstance(leaf, Tensor):
        return [f"has a {type(leaf).__name__}, the config needs shape {shape}"]
    problems = []
    if tuple(leaf.shape) != shape:
        problems.append(f"has shape {tuple(leaf.shape)}, the config needs shape {shape}")
    if leaf.dtype not in COMPUTED:
        problems.append(f"is {leaf.dtype}, {_needed(leaf.dtype)}")
    if leaf.is_meta:
        problems.append("has no numbers: it is on the device 'meta'")
    return problems


def _needed(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "at least 16 bits are needed; let transformers widen and save them, with the scales that they may have"
    return "floating-point numbers are needed"


def _dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
