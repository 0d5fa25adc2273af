"""Comparisons that tests rest on: trees of tensors, and gradient functions against the plain gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rpfunc import reference, tree
from rpfunc.batch import Batch
from rpfunc.model import Model, Params, accumulator_dtype
from rpfunc.objectives.objective import Objective


def gradient_error(found: Any, wanted: Any) -> float:
    """Returns the largest ‖found - wanted‖ / (‖wanted‖ + 1e-3 · root mean square of all leaves' norms) of any leaf.

    The second term keeps a leaf whose gradient is exactly zero from dividing by zero. Computed in float64; inf where
    anything is not finite. Raises AssertionError where structures or shapes differ.

    >>> gradient_error({"w": torch.tensor([3.0, 4.5])}, {"w": torch.tensor([3.0, 4.0])}) < 0.1
    True
    """
    _assert_same_shapes(found, wanted)
    norms, errors = [], []
    for one, other in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        one, other = (leaf.to(torch.complex128 if leaf.is_complex() else torch.float64) for leaf in (one, other))
        norms.append(float(other.norm()))
        errors.append(float((one - other).norm()))
    typical = (sum(norm * norm for norm in norms) / max(len(norms), 1)) ** 0.5
    worst = 0.0
    for norm, error in zip(norms, errors, strict=True):
        if error != 0.0:  # nan, too
            scale = norm + 1e-3 * typical
            worst = max(worst, error / scale if scale > 0.0 and error < float("inf") else float("inf"))
    return worst


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    """Raises AssertionError where `gradient_error` exceeds `tolerance`; tolerance 0 demands equal values."""
    if tolerance == 0.0:
        assert_equal(found, wanted)
        return
    error = gradient_error(found, wanted)
    assert error <= tolerance, f"relative error {error:.3g} of at most {tolerance:.3g}"


def assert_equal(found: Any, wanted: Any) -> None:
    """Raises AssertionError, naming the leaves, unless every two leaves have equal values and shapes (0.0 == -0.0)."""
    _assert_same_shapes(found, wanted)
    differing = [
        f"{path}: {_first_difference(one, other.to(one.dtype))}"
        for path, one, other in zip(tree.paths(wanted), tree.leaves(found), tree.leaves(wanted), strict=True)
        if not torch.equal(one, other.to(one.dtype))
    ]
    assert not differing, "\n".join(differing)


def _first_difference(found: Tensor, wanted: Tensor) -> str:
    differs = found != wanted
    place = differs.nonzero()[0].tolist()
    where = f" at [{', '.join(map(str, place))}]" if place else ""
    one, other = found[tuple(place)].item(), wanted[tuple(place)].item()
    count = f"{int(differs.sum())} of {differs.numel()} numbers differ, the first{where}: " if place else ""
    return f"{count}found {one}, needed {other}"


def assert_equal_bits(found: Any, wanted: Any) -> None:
    """Raises AssertionError, naming the leaves, unless every two leaves have the same dtype, shape and bits."""
    _assert_same_shapes(found, wanted)
    pairs = zip(tree.paths(wanted), tree.leaves(found), tree.leaves(wanted), strict=True)
    differing = [path for path, one, other in pairs if one.dtype != other.dtype or not _same_bits(one, other)]
    assert not differing, f"bits differ in {', '.join(path or 'the tensor' for path in differing)}"


@contextmanager
def assert_untouched(*trees: Any) -> Iterator[None]:
    """Raises AssertionError if the block changes a bit of any tensor in `trees` (Batches count as trees)."""
    plain = [_plain(each) for each in trees]
    copies = [tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, each) for each in plain]
    yield
    for each, copy in zip(plain, copies, strict=True):
        _assert_same_shapes(each, copy)
        for path, one, other in zip(tree.paths(copy), tree.leaves(each), tree.leaves(copy), strict=True):
            same = _same_bits(one, other) if isinstance(one, Tensor) else one == other
            assert same, f"argument {path} was written to"


def assert_computes(
    function: Callable[[Params, Batch], tuple[Any, Any]],
    model: Model,
    objective: Objective,
    params: Params,
    batch: Batch,
    *,
    tolerance: float = 0.0,
) -> None:
    """Raises AssertionError unless function(params, batch) gives `reference.value_and_grad`'s loss and gradients.

    `function` returns (loss, or a Result that holds it; gradients). Demands that the arguments stay as they were, and
    that gradients are float32 or wider.
    """
    wanted_loss, wanted = reference.value_and_grad(model, objective)(params, batch)
    with assert_untouched(params, batch):
        result, grads = function(params, batch)
    loss = result if isinstance(result, Tensor) else result.loss
    assert_close({"loss": loss}, {"loss": wanted_loss}, tolerance)
    assert_close(grads, wanted, tolerance)
    for leaf, grad in zip(tree.leaves(dict(params)), tree.leaves(grads), strict=True):
        assert grad.dtype == accumulator_dtype(leaf.dtype), f"gradient of {leaf.dtype} parameter is {grad.dtype}"


def _plain(each: Any) -> Any:
    if isinstance(each, Batch):
        return {name: dict(getattr(each, name)) for name in ("row", "example", "group", "constant")}
    return each


def _same_bits(one: Tensor, other: Tensor) -> bool:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    one, other = (torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in (one, other))
    one, other = (leaf.contiguous().view(kinds[leaf.element_size()]) for leaf in (one, other))
    return torch.equal(one, other)


def _assert_same_shapes(found: Any, wanted: Any) -> None:
    assert tree.same_structure(found, wanted), f"found the tree {tree.paths(found)}, needed {tree.paths(wanted)}"
    differing = [
        f"{path}: found shape {tuple(one.shape)}, needed {tuple(other.shape)}"
        for path, one, other in zip(tree.paths(wanted), tree.leaves(found), tree.leaves(wanted), strict=True)
        if isinstance(other, Tensor) and one.shape != other.shape
    ]
    assert not differing, "\n".join(differing)
