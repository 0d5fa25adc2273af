"""Vector-Jacobian products over the differentiable leaves of pytrees, and who owns the tensors they return."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import ModelError
from rpfunc.model import Flat, accumulator_dtype
from rpfunc.stream.transforms import running_transforms
from rpfunc.sums import Sums, add, whole


def floating(structured: Any) -> tuple[Flat, Callable[[Flat], Any]]:
    """Returns the floating-point leaves, complex ones too, and a function that puts others in their place.

    Other leaves (ids, masks, frozen parameters) stay as they are: they ride along and have no gradient.
    """
    leaves, structure = tree.flatten(structured)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and is_inexact(leaf)]

    def rebuild(flat: Flat) -> Any:
        filled = list(leaves)
        for place, leaf in zip(places, flat, strict=True):
            filled[place] = leaf
        return tree.unflatten(structure, filled)

    return tuple(leaves[place] for place in places), rebuild


def is_inexact(leaf: Tensor) -> bool:
    """Returns whether a leaf has a gradient: floating-point numbers have, complex ones too; integers have not."""
    return leaf.is_floating_point() or leaf.is_complex()


def contiguous(structured: Any) -> Any:
    """Returns the tree with its tensors contiguous: themselves, or views of them, where they are so.

    What passes from layer to layer does, in both directions. Kernels sum in an order that depends on strides, and what
    crosses a stage's border is contiguous: so it is inside a stage, and no plan changes a bit.
    """
    return tree.map(lambda leaf: _contiguous(leaf) if isinstance(leaf, Tensor) else leaf, structured)


def _contiguous(leaf: Tensor) -> Tensor:
    leaf = leaf.contiguous()
    # what is one long may have any stride and counts as contiguous, but kernels look at it
    return leaf.view(-1).view(leaf.shape) if 1 in leaf.shape else leaf


def dense(leaf: Tensor) -> Tensor:
    """Returns a tensor whose copies have its strides: itself, or a copy where it has gaps or overlaps."""
    return leaf if torch.empty_like(leaf, device="meta").stride() == leaf.stride() else leaf.clone()


def requiring(params: Any) -> Any:
    """Returns parameters that say that they require gradients, though none is taken: frozen ones do not.

    torch.matmul takes another kernel for those that do, and inside a derivative they do: so a forward pass has the bits
    of one that is differentiated.
    """
    return tree.map(
        lambda leaf: leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and is_inexact(leaf) else leaf, params
    )


def unrequiring(structured: Any) -> Any:
    """Returns the tree with tensors that require no gradients: themselves where they do not."""
    return tree.map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf, structured)


def vjp(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Callable[[Flat], tuple[Flat, ...]]]:
    """Returns function(*arguments) and its pullback: output cotangent -> one flat cotangent for each argument.

    `torch.func.vjp` on flat tuples. The pullback may be called once; its results may share memory with its input
    and with each other (see `own`).
    """
    flats, rebuilds = zip(*(floating(argument) for argument in arguments), strict=True)
    sizes = [len(flat) for flat in flats]

    structures = []

    def call(*leaves: Tensor) -> tuple[Flat, Flat]:
        parts = _cut(leaves, sizes)
        output = function(*(rebuild(part) for rebuild, part in zip(rebuilds, parts, strict=True)))
        # torch.func has pytrees of its own, in which None is a leaf: it gets flat tuples only
        every_leaf, structure = tree.flatten(output)
        structures.append(structure)
        odd = [path for path, leaf in zip(tree.paths(output), every_leaf, strict=True) if not isinstance(leaf, Tensor)]
        if odd:
            raise ModelError(f"layer: leaf {odd[0] or 'output'} of what it returns is no tensor; make it one")
        # torch.func.vjp needs an output to differentiate, even where all are integers
        return floating(output)[0] or (torch.zeros((), device=leaves[0].device),), tuple(every_leaf)

    primals = tuple(leaf for flat in flats for leaf in flat)
    if not running_transforms():  # no other derivative is to go through this one
        primals = unrequiring(primals)
    if not primals:  # torch.func.vjp needs something to differentiate
        return function(*arguments), lambda cotangent: tuple(() for _ in arguments)
    result: Any = torch.func.vjp(call, *primals, has_aux=True)
    _, pull, output = result

    def pullback(cotangent: Flat) -> tuple[Flat, ...]:
        # called once: each residual is freed as soon as it has been read
        return tuple(
            _cut(
                pull(cotangent or (torch.zeros((), device=primals[0].device),), retain_graph=False, create_graph=False),
                sizes,
            )
        )

    return tree.unflatten(structures[0], output), pullback


def accumulate(total: Sums | None, contribution: Flat, foreign: Sums = ()) -> Sums:
    """Returns total + contribution, float32 or wider; both are donated, `foreign` are tensors of somebody else.

    The first contribution becomes the total: no buffer is held for a gradient before there is one.
    """
    if total is None:
        return own(tuple(part.to(accumulator_dtype(part.dtype)) for part in contribution), foreign)
    return tuple(add(whole(each, part), part) for each, part in zip(total, contribution, strict=True))


def own(tensors: Flat, foreign: Sums = ()) -> Flat:
    """Returns `tensors`, each in dense memory that neither another one nor a `foreign` tensor shares.

    A pullback may return its cotangent (identity), one tensor twice (a + b) or an expanded one (sum): writing into
    such a result would write elsewhere too, so it is copied first.
    """
    taken = {tensor.untyped_storage() for tensor in tree.leaves(foreign)}
    owned = []
    for tensor in tensors:
        if tensor.untyped_storage() in taken or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        taken.add(tensor.untyped_storage())
        owned.append(tensor)
    return tuple(owned)


class FewChunks(int):
    """A chunk size of which the first chunk and the last two are worked on, in buffers for all rows.

    What comes out is nonsense, what it takes is not: the last chunks see most rows, the first one goes another way
    through attention, and no chunk between finds more in memory than the last but one. For `rpfunc.plan.memory`.
    """


def spans(num_rows: int, chunk: int) -> list[tuple[int, int]]:
    """Returns the half-open row ranges of each chunk, the last one possibly shorter.

    >>> spans(7, 3), spans(100, FewChunks(10))
    ([(0, 3), (3, 6), (6, 7)], [(0, 10), (80, 90), (90, 100)])
    """
    starts = range(0, num_rows, chunk)
    few = isinstance(chunk, FewChunks) and len(starts) > 3
    return [(start, min(start + chunk, num_rows)) for start in ((0, *starts[-2:]) if few else starts)]


def even_spans(num_rows: int, most: int) -> list[tuple[int, int]]:
    """Returns as few half-open row ranges of at most `most` rows as cover num_rows, as even as can be.

    >>> even_spans(10, 4)
    [(0, 3), (3, 6), (6, 10)]
    """
    count = -(-num_rows // most)
    cuts = [num_rows * index // count for index in range(count + 1)]
    return list(pairwise(cuts))[-2 if isinstance(most, FewChunks) else 0 :]


def rows(structured: Any, start: int, stop: int) -> Any:
    """Returns rows start to stop of every leaf (dimension 1), contiguous: views where that is so, else copies.

    Kernels sum in an order that depends on strides: so a run of rows has the same bits by itself and as part of more.
    """
    return tree.map(lambda leaf: _contiguous(leaf[:, start:stop]), structured)


def write(buffer: Any, structured: Any, start: int, stop: int, num_rows: int) -> Any:
    """Returns `buffer` (donated; None makes one for `num_rows` rows) with rows start to stop overwritten.

    Raises ModelError unless every leaf has as many rows: one row would be copied to all of them without a word.
    """
    check_rows(structured, stop - start)
    if buffer is None:
        if (start, stop) == (0, num_rows):
            return structured
        buffer = tree.map(lambda leaf: leaf.new_empty((leaf.shape[0], num_rows, *leaf.shape[2:])), structured)
    tree.map(lambda place, leaf: place[:, start:stop].copy_(leaf), buffer, structured)
    return buffer


def check_rows(structured: Any, num_rows: int) -> None:
    """Raises ModelError unless every leaf of what a layer's function returned is a tensor (B, num_rows, ...)."""
    for index, leaf in enumerate(tree.leaves(structured)):
        if not isinstance(leaf, Tensor) or leaf.dim() < 2 or leaf.shape[1] != num_rows:
            found = tuple(leaf.shape) if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise ModelError(
                f"layer: of {num_rows} rows, leaf {tree.paths(structured)[index] or 'output'} of what its function "
                f"returned is {found}; it must be a tensor (B, {num_rows}, ...), a row for each row (a layer whose "
                "rows do not match is opaque)"
            )


def overwrite(dx: Flat | None, cotangent: Flat, dx_rows: Flat, start: int, stop: int, num_rows: int) -> Flat:
    """Returns dx with rows start to stop set; the first call (dx is None) picks its buffer.

    That is the cotangent's own memory where shapes and dtypes agree, since the rows being written have been read for
    the last time: a layer then needs no second buffer of its input's size.
    """
    dx_rows = own(dx_rows, foreign=cotangent)
    if dx is None:
        kinds = [[(leaf.dtype, leaf.shape[:1] + leaf.shape[2:]) for leaf in flat] for flat in (cotangent, dx_rows)]
        dx = cotangent if kinds[0] == kinds[1] else None
    written: Flat = write(dx, dx_rows, start, stop, num_rows)
    return written


def _cut(leaves: Flat, sizes: list[int]) -> list[Flat]:
    parts, start = [], 0
    for size in sizes:
        parts.append(tuple(leaves[start : start + size]))
        start += size
    return parts
