"""Checkpoints: one safetensors file, written beside and renamed, so that there is always a whole one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rpfunc import tree
from rpfunc.errors import CheckpointError
from rpfunc.files import replace_file
from rpfunc.runtime.state import State
from rpfunc.stream.flat import own

FORMAT = "rpfunc checkpoint 1"


def save(path: Path, state: State, notes: Mapping[str, str] | None = None, *, frozen: tree.Mask | None = None) -> None:
    """Writes a state, with `notes` (text by name) in the file's header; leaves that `frozen` selects are left out.

    The bytes go to a file beside `path`, reach the disk, and then take its name: whenever the process is killed,
    `path` is a whole checkpoint, the last one or this one.
    """
    trees = _trees(state, frozen)
    tensors = dict(zip(tree.paths(trees), (leaf.detach().cpu() for leaf in tree.leaves(trees)), strict=True))
    unshared = dict(zip(tensors, own(tuple(tensors.values())), strict=True))
    header = {**(notes or {}), "format": FORMAT, "step": str(state.step)}
    try:
        replace_file(path, lambda beside: save_file(unshared, beside, metadata=header))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint {path}: cannot be written ({error}); the one before it is whole") from error


def load(path: Path, like: State, *, frozen: tree.Mask | None = None) -> State:
    """Returns the state in `path`, with the structure of `like` (a state of the same model and optimizer).

    Leaves that `frozen` selects are not in the file: they are those of `like`.

    Raises CheckpointError if the file is missing, cut short or of another kind, or names every tensor that is
    missing, unexpected, or of another shape or dtype.
    """
    header = read_notes(path)
    trees = _trees(like, frozen)
    wanted = dict(zip(tree.paths(trees), tree.leaves(trees), strict=True))
    with safe_open(path, framework="pt") as file:
        # copied out, so that no parameter lives in a mapped file that a later checkpoint replaces
        found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (no mapping)
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        kinds = [f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in (found[name], wanted[name])]
        if kinds[0] != kinds[1]:
            problems.append(f"{name} is {kinds[0]}, the model needs {kinds[1]}")
    if problems:
        raise CheckpointError.listing(f"checkpoint {path} is of another model or optimizer", sorted(problems))
    restored = tree.unflatten(tree.flatten(trees)[1], [found[name] for name in tree.paths(trees)])
    params = tree.combine(tree.partition(dict(like.params), _mask(frozen))[0], restored["params"])
    return State(params, restored["optimizer"], int(header["step"]))


def read_notes(path: Path) -> dict[str, str]:
    """Returns the header's text entries, `step` among them. Raises CheckpointError if there is no whole checkpoint."""
    try:
        with safe_open(path, framework="pt") as file:
            notes = dict(file.metadata() or {})
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path}: there is no such file") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint {path}: is cut short or no safetensors file ({error})") from error
    if notes.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path}: is a safetensors file but no {FORMAT!r}")
    return notes


def _trees(state: State, frozen: tree.Mask | None) -> dict[str, Any]:
    _, trained = tree.partition(dict(state.params), _mask(frozen))
    return {"params": trained, "optimizer": state.optimizer_state}


def _mask(frozen: tree.Mask | None) -> tree.Mask:
    return False if frozen is None else frozen
