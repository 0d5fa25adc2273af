"""Checkpoints: one safetensors file, written beside and renamed, so that there is always a whole one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
    path, notes = Path(path), notes or {}
    odd = [
        f"note {name!r} is a {type(text).__name__}, needs text" for name, text in notes.items() if type(text) is not str
    ]
    if odd:
        raise CheckpointError.listing(f"checkpoint {path}", odd)
    values = state.values()
    tensors = _named(_trees(values, frozen))
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
    header = read_notes(path)
    with safe_open(path, framework="pt") as file:
        # copied out, so that no parameter lives in a mapped file that a later checkpoint replaces
        found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (no mapping)
    values = like.values()
    is_stale = any(name.split(".", 1)[0] == "stale" for name in found)
    trees = _trees(values._replace(stale=values.params if is_stale else None), frozen)
    problems = sorted(_differences(found, _named(trees)))
    if problems:
        raise CheckpointError.listing(f"checkpoint {path} is of another model or optimizer", problems)
    restored = tree.unflatten(tree.flatten(trees)[1], [found[name] for name in tree.paths(trees)])
    fixed, _ = tree.partition(dict(values.params), _mask(frozen))
    params, stale = (
        dict(tree.combine(fixed, restored[part])) if part in restored else None for part in ("params", "stale")
    )
    assert params is not None
    try:
        step, scales = int(header["step"]), tuple(LossScale(*each) for each in json.loads(header.get("scales", "[]")))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path}: its header cannot be read ({error!r})") from error
    return State(params, restored["optimizer"], step, stale=stale, scales=scales)


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
