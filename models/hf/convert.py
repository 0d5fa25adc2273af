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
        elif not tensor.is_floating_point():
            problems.append(f"{stored[name]} is {tensor.dtype}, floating-point numbers are needed")
        else:
            leaves.update(zip(expected[name].paths, expected[name].leaves(tensor), strict=True))
    if problems:
        raise CheckpointError.listing(subject, sorted(problems))
    params: dict[str, Any] = build(leaves)
    return params


def check_params(table: Table, params: Mapping[str, Any], *, may_lack: bool = False) -> None:
    """Raises ModelError listing every leaf that is missing (unless it may), unexpected or of another shape."""
    found = dict(zip(tree.paths(dict(params)), tree.leaves(dict(params)), strict=True))
    needed = {
        _dotted(path): shape for stored in table for path, shape in zip(stored.paths, stored.leaf_shapes(), strict=True)
    }
    missing = set() if may_lack else needed.keys() - found.keys()
    problems = [f"leaf {path} is missing" for path in missing]
    problems += [f"leaf {path} is unexpected" for path in found.keys() - needed.keys()]
    for path in needed.keys() & found.keys():
        leaf = found[path]
        shown = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        if shown != f"shape {needed[path]}":
            problems.append(f"leaf {path} has {shown}, the config needs shape {needed[path]}")
    if problems:
        raise ModelError.listing("params or gradients do not fit the config", sorted(problems))


def leaves_of(stored: Stored, params: Mapping[str, Any]) -> list[Any]:
    """Returns the leaves that a stored tensor holds, None where `params` has None."""
    found = []
    for path in stored.paths:
        below: Any = params
        for step in path:
            below = None if below is None else below[step]
        found.append(below)
    return found


def _dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
