"""Vector-Jacobian products whose parameter gradients are added to a running sum, in few passes over memory.

The gradient of a weight W in y = x Wᵀ is a product, dyᵀ x, and that of a table is rows at some places. A chunk of few
rows makes a whole gradient as large as W, which is then read once to be added: for a head of 32,000 x 512 and 100
rows that takes longer than the product. Here such products go into the sum as they are made: a matrix product with
the sum as its third operand, rows added in place. No gradient of a large weight exists beside the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from rpfunc.model import Flat, accumulator_dtype
from rpfunc.stream.few_rows import LARGE
from rpfunc.stream.flat import accumulate, floating, vjp
from rpfunc.stream.transforms import running_transforms
from rpfunc.sums import Rows, Sum, Sums, add, whole

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A way to compute `F.linear`."""

AccumulatingPull = Callable[[Flat, Sums | None], tuple[Sums, tuple[Flat, ...]]]
"""(cotangent, grads) -> (grads + dparams, one flat cotangent for each other argument); `grads` is donated."""


def vjp_into(
    function: Callable[..., Any], params: Any, *others: Any, large: int = LARGE, linear: Linear = F.linear
) -> tuple[Any, AccumulatingPull]:
    """Returns function(params, *others) and its pullback, which adds the parameters' gradients to a sum.

    As `vjp` and `accumulate`; of leaves of `params` with `large` elements or more, the products that `F.linear` and
    `F.embedding` contribute are added in place; `linear` computes the former forward. The pullback may be called once.
    Complex leaves, and products inside a transform of torch.func (vmap, jvp, grad), are left to torch.
    Source: own.
    """
    leaves, _ = floating(params)
    sums: _Sums | None = None
    plain = all(leaf.numel() < large for leaf in leaves) or torch.is_autocast_enabled(leaves[0].device.type)
    if plain or running_transforms():
        output, pull = vjp(function, params, *others)
    else:
        sums = running = _Sums(leaves)

        def watched(params: Any, *others: Any) -> Any:
            with _AddingProducts(running, floating(params)[0], large, linear):
                return function(params, *others)

        output, pull = vjp(watched, params, *others)

    def pullback(cotangent: Flat, grads: Sums | None) -> tuple[Sums, tuple[Flat, ...]]:
        if sums is not None and grads is not None:
            sums.totals[:] = grads
        dparams, *rest = pull(cotangent)
        foreign = cotangent + sum(rest, start=())
        if sums is None:
            return accumulate(grads, dparams, foreign), tuple(rest)
        return sums.finish(dparams, foreign), tuple(rest)

    return output, pullback


class _Sums:
    """The running sum of each leaf's gradient, while one pullback runs."""

    def __init__(self, leaves: Flat) -> None:
        self.totals: list[Sum | None] = [None] * len(leaves)
        self._nothing = [torch.zeros((), dtype=leaf.dtype, device=leaf.device) for leaf in leaves]

    def nothing(self, place: int, shape: torch.Size) -> Tensor:
        """Returns the zero that tells `finish` that a gradient has been added already."""
        return self._nothing[place].expand(shape)

    def add_product(self, place: int, left: Tensor, right: Tensor) -> None:
        """Adds left @ right."""
        total = self.totals[place]
        if total is None:
            self.totals[place] = (left @ right).to(accumulator_dtype(left.dtype))
            return
        total = self.totals[place] = whole(total, self._nothing[place].expand(len(left), right.shape[1]))
        if total.dtype == left.dtype:
            total.addmm_(left, right)
        else:
            total.add_(left @ right)

    def add_rows(self, place: int, rows: Tensor, values: Tensor) -> None:
        """Adds values (n, ...) to the rows (n,)."""
        total, dtype = self.totals[place], accumulator_dtype(values.dtype)
        # where they are kept, they must not change with a cotangent that is overwritten
        kept = not isinstance(total, Tensor)
        part = Rows((rows.to(torch.int64, copy=kept),), (values.to(dtype, copy=kept),))
        self.totals[place] = part if total is None else add(total, part)

    def finish(self, dparams: Flat, foreign: Flat) -> Sums:
        """Returns the sums with those gradients added that came as tensors."""
        taken: Sums = foreign
        for place, (part, nothing) in enumerate(zip(dparams, self._nothing, strict=True)):
            total = self.totals[place]
            if total is None or part.untyped_storage() != nothing.untyped_storage():
                (total,) = accumulate(None if total is None else (total,), (part,), taken)
            self.totals[place] = total
            taken = (*taken, total)
        return tuple(total for total in self.totals if total is not None)


class _AddingProducts(TorchFunctionMode):
    """While a function runs forward, lets its large weights' gradients go into `sums` on the way back."""

    def __init__(self, sums: _Sums, leaves: Flat, large: int, linear: Linear) -> None:
        self._sums, self._linear = sums, linear
        self._places = {
            id(leaf): place for place, leaf in enumerate(leaves) if leaf.numel() >= large and leaf.is_floating_point()
        }
        self._outside = running_transforms()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self._places.get(id(args[1])) if len(args) > 1 and function in (F.linear, F.embedding) else None
        if place is not None and (running_transforms() != self._outside or _casts(args[0])):
            place = None  # what comes back through a further transform is no gradient of this function
        if place is not None and function is F.linear and len(args) + len(kwargs or {}) <= 3:
            bias = args[2] if len(args) == 3 else (kwargs or {}).get("bias")
            return _Linear.apply(args[0], args[1], bias, self._sums, place, self._linear)  # type: ignore[no-untyped-call]
        # elsewhere than on a CPU, adding rows in place has no fixed order
        if (
            place is not None
            and function is F.embedding
            and args[1].is_cpu
            and is_plain_look_up(*args[2:], **(kwargs or {}))
        ):
            return _Embedding.apply(args[0], args[1], self._sums, place)  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


def _casts(x: Any) -> bool:
    """Returns whether autocast, which a function may turn on for itself, may give products another dtype."""
    return isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type)


def is_plain_look_up(
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    input: Tensor | None = None,  # noqa: A002
    weight: Tensor | None = None,
) -> bool:
    """Returns whether these options of `F.embedding` leave rows and gradients as they are; operands may be named."""
    del norm_type, input, weight
    return padding_idx is None and max_norm is None and not scale_grad_by_freq and not sparse


class _Linear(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, sums: _Sums, place: int, linear: Linear) -> Tensor:
        return linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.sums, ctx.place, ctx.linear = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = cotangent.reshape(-1, cotangent.shape[-1])
        ctx.sums.add_product(ctx.place, flat.T, x.reshape(-1, x.shape[-1]))
        dx = ctx.linear(cotangent, weight.T, None) if ctx.needs_input_grad[0] else None
        dbias = flat.sum(dim=0) if ctx.needs_input_grad[2] else None
        return dx, ctx.sums.nothing(ctx.place, weight.shape), dbias, None, None, None


class _Embedding(Function):
    @staticmethod
    def forward(ids: Tensor, table: Tensor, sums: _Sums, place: int) -> Tensor:
        return F.embedding(ids, table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ids, table, ctx.sums, ctx.place = inputs
        ctx.save_for_backward(ids)
        ctx.shape = table.shape

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.sums.add_rows(ctx.place, ids.flatten(), cotangent.reshape(-1, cotangent.shape[-1]))
        return None, ctx.sums.nothing(ctx.place, ctx.shape), None, None
