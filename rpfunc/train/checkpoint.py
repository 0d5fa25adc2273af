"""Checkpoints: one safetensors file, written beside and renamed, so that there is always a whole one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import CheckpointError
from rpfunc.files import replace_file
from rpfunc.model import Params
from rpfunc.runtime.state import LossScale, State, Values
from rpfunc.stream.flat import own

FORMAT = "rpfunc checkpoint 2"
"""What is written: parameters, optimizer state, what an asynchronous run computes with next, loss scales, the step."""

FORMATS = ("rpfunc checkpoint 1", FORMAT)
"""What is read: the first one held parameters, optimizer state and step, all that a synchronous run in float32 has."""


def save(
    path: Path | str, state: State, notes: Mapping[str, str] | None = None, *, frozen: tree.Mask | None = None
) -> None:
    """Writes a state, with `notes` (text by name) in the file's header; leaves that `frozen` selects are left out.

    An update under way is waited for: all that is written is of one step. The bytes go to a file beside `path`, reach
    the disk, and then take its name: whenever the process is killed, `path` is a whole checkpoint, the last one or
    this one.
    """
    path, notes, values = Path(path), notes or {}, _values(path, state)
    tensors = _named(_trees(values, frozen))
    odd = [
        f"note {name!r} is a {type(text).__name__}, needs text under a name that is text"
        for name, text in notes.items()
        if type(text) is not str or type(name) is not str
    ]
    odd += [
        f"{name} is a {type(leaf).__name__}, needs a tensor"
        for name, leaf in tensors.items()
        if not isinstance(leaf, Tensor)
    ]
    if path.exists() and not path.is_file():
        odd.append("is there and is no regular file, which a checkpoint could replace; another name would do")
    if odd:
        raise CheckpointError.listing(f"checkpoint {path}", odd)
    unshared = dict(zip(tensors, own(tuple(leaf.detach().cpu() for leaf in tensors.values())), strict=True))
    header = {**notes, "format": FORMAT, "step": str(state.step), "scales": json.dumps(values.scales)}
    try:
        replace_file(path, lambda beside: save_file(unshared, beside, metadata=header))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint {path}: cannot be written ({error}); the one before it is whole") from error


def load(path: Path | str, like: State, *, frozen: tree.Mask | None = None) -> State:
    """Returns the state in `path`, with the structure of `like` (a state of the same model and optimizer).

    Leaves that `frozen` selects are not in the file: they are those of `like`. The parameters of the step before,
    which an asynchronous run goes on with, are there if the run was one, in the dtype that it computed in.

    Raises CheckpointError if the file is missing, cut short or of another kind, or names every tensor that is
    missing, unexpected, or of another shape or dtype.
    """
    header, values = read_notes(path), _values(path, like)
    with safe_open(path, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        is_stale = any(name.split(".", 1)[0] == "stale" for name in found)
        trees = _trees(values._replace(stale=values.params if is_stale else None), frozen)
        wanted = _named(trees)
        problems = sorted(_differences(found, wanted))
        if problems:
            raise CheckpointError.listing(f"checkpoint {path} is of another model or optimizer", problems)
        # copied out, so that no parameter lives in a mapped file that a later checkpoint replaces; with the strides of
        # `like`, on which the last bits of what is computed with it depend
        leaves = [torch.empty_like(leaf, dtype=found[name].dtype).copy_(found[name]) for name, leaf in wanted.items()]
    restored = tree.unflatten(tree.flatten(trees)[1], leaves)
    fixed, _ = tree.partition(dict(values.params), _mask(frozen))
    params, stale = (
        dict(tree.combine(fixed, restored[part])) if part in restored else None for part in ("params", "stale")
    )
    assert params is not None
    try:
        step, scales = int(header["step"]), [LossScale(*each) for each in json.loads(header.get("scales", "[]"))]
        return State(params, restored["optimizer"], step, stale=stale, scales=scales)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path}: its header cannot be read ({error!r})") from error


def read_notes(path: Path | str) -> dict[str, str]:
    """Returns the header's text entries, `step` among them. Raises CheckpointError if there is no whole checkpoint."""
    try:
        with safe_open(path, framework="pt") as file:
            notes = dict(file.metadata() or {})
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path}: there is no such file") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint {path}: is cut short or no safetensors file ({error})") from error
    if notes.get("format") not in FORMATS:
        raise CheckpointError(f"checkpoint {path}: is a safetensors file but no {FORMAT!r}")
    return notes


def _values(path: Path | str, state: Any) -> Values:
    if not isinstance(state, State):
        raise CheckpointError(
            f"checkpoint {path}: got a {type(state).__name__}, needs a State (State.create makes one)"
        )
    return state.values()


def _differences(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[str]:
    yield from (f"{name} is missing" for name in wanted if name not in found)
    yield from (f"{name} is unexpected" for name in found if name not in wanted)
    for name in wanted.keys() & found.keys():
        leaves = found[name], wanted[name]
        # which dtype an asynchronous run computed in, the model does not say
        dtypes = ["" if name.split(".", 1)[0] == "stale" else f" {leaf.dtype}" for leaf in leaves]
        kinds = [f"{tuple(leaf.shape)}{dtype}" for leaf, dtype in zip(leaves, dtypes, strict=True)]
        if kinds[0] != kinds[1]:
            yield f"{name} is {kinds[0]}, the model needs {kinds[1]}"


def _trees(values: Values, frozen: tree.Mask | None) -> dict[str, Any]:
    trees = {"params": _trained(values.params, frozen), "optimizer": values.optimizer_state}
    return trees if values.stale is None else {**trees, "stale": _trained(values.stale, frozen)}


def _trained(params: Params, frozen: tree.Mask | None) -> Any:
    return tree.partition(dict(params), _mask(frozen))[1]


def _named(trees: Any) -> dict[str, Tensor]:
    return dict(zip(tree.paths(trees), tree.leaves(trees), strict=True))


def _mask(frozen: tree.Mask | None) -> tree.Mask:
    return False if frozen is None else frozen
