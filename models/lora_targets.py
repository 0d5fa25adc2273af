"""Which weights of a model an adapter may stand on, by their paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor

from rpfunc import tree
from rpfunc.errors import ModelError
from rpfunc.model import Model, Params

EXPERTS = "experts"
"""What `rpfunc.models.feedforward.experts` reads them as."""


class Weight(NamedTuple):
    """A leaf of at least two dimensions: the layer that reads it, its place among all that the layer reads, itself."""

    layer: str
    place: int
    tensor: Tensor


def weights(model: Model, params: Params) -> dict[str, Weight]:
    """Returns every weight by its path: its layer's name, and where it stands in what the layer reads.

    A weight that two layers read (a tied head's) has two paths.
    """
    model.check(params)
    found = {}
    for layer in model.layers:
        selected = layer.select(params)
        for place, (path, leaf) in enumerate(zip(tree.paths(selected), tree.leaves(selected), strict=True)):
            if leaf.dim() >= 2:
                found[f"{layer.name}.{path}" if path else layer.name] = Weight(layer.name, place, leaf)
    return found


def matching(paths: Mapping[str, object], targets: Sequence[str]) -> list[str]:
    """Returns the paths, in order, that a target matches whole or from a dot on (`fnmatch`).

    Raises ModelError listing the targets that match none, with paths that are near.

    >>> matching(dict.fromkeys(["block0.query", "block0.value", "block1.query"]), ["query"])
    ['block0.query', 'block1.query']
    """
    matches = {target: [path for path in paths if _matches(path, target)] for target in targets}
    ends = {path.split(".", dots)[-1]: path for path in [*paths][::-1] for dots in range(path.count(".") + 1)}
    problems = []
    for target in (target for target, found in matches.items() if not found):
        near = [ends[end] for end in get_close_matches(target, ends, cutoff=0.5)] or [*paths][:3]
        problems.append(
            f"target {target!r} matches no leaf of two dimensions or more; near it are {', '.join(dict.fromkeys(near))}"
        )
    if problems:
        raise ModelError.listing("lora", problems)
    return [path for path in paths if any(path in found for found in matches.values())]


def without_rows(paths: Sequence[str], found: Mapping[str, Weight]) -> list[str]:
    """Returns, in words, those of `paths` whose weights meet no rows (B, T, ...) that dropout could be drawn for."""
    problems = []
    # experts, and the router beside them, get the rows of all examples one after the other
    mixtures = {path.split(f".{EXPERTS}.")[0] for path in found if f".{EXPERTS}." in path}
    for path in paths:
        advice = "so its adapter has no dropout; use dropout=0, or other targets"
        if found[path].tensor.dim() > 2:
            problems.append(f"{path} is of shape {tuple(found[path].tensor.shape)} and no (outputs, inputs), {advice}")
        elif any(path.startswith(f"{mixture}.") for mixture in mixtures):
            problems.append(f"{path} belongs to experts, whose rows come without their examples, {advice}")
    return problems


def _matches(path: str, target: str) -> bool:
    return fnmatchcase(path, target) or fnmatchcase(path, f"*.{target}")
