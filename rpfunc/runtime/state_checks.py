"""What a training state that is made by hand, or read from a file, may hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rpfunc import tree
from rpfunc.checks import is_count, is_real, shown
from rpfunc.model import Params


def scale_problems(scales: Any) -> list[str]:
    """Returns, in words, what is no loss scale; a pair read from a file may be a list."""
    if not isinstance(scales, Sequence) or isinstance(scales, str):
        return [f"scales is {shown(scales)}, needs pairs (factor, clean)"]
    return [
        f"scales[{index}] is {shown(scale)}, needs (factor, clean): a power of 2, and a number of steps"
        for index, scale in enumerate(scales)
        if not _is_scale(scale)
    ]


def _is_scale(scale: Any) -> bool:
    if not isinstance(scale, Sequence) or isinstance(scale, str) or len(scale) != 2:
        return False
    factor, clean = scale
    is_power = is_real(factor) and 0 < factor < math.inf and math.frexp(factor)[0] == 0.5
    return is_power and is_count(clean) and clean >= 0


def stale_problems(stale: Any, params: Params) -> list[str]:
    """Returns, in words, where stale parameters are not such as the parameters; they may be of another dtype."""
    if not isinstance(stale, Mapping):
        return [f"stale is a {type(stale).__name__}, needs parameters such as params, or None"]
    found, wanted = _shapes(stale), _shapes(params)
    return [
        f"stale {path or 'itself'} is {found.get(path, 'missing')}, in params it is {wanted.get(path, 'missing')}"
        for path in sorted(found.keys() | wanted.keys())
        if found.get(path) != wanted.get(path)
    ]


def _shapes(params: Params) -> dict[str, Any]:
    leaves = zip(tree.paths(dict(params)), tree.leaves(dict(params)), strict=True)
    return {path: tuple(getattr(leaf, "shape", ())) for path, leaf in leaves}
