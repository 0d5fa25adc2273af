"""Causal attention of a chunk without a mask: the rows before it, and its own square, joined by their log-sum-exps.

Every query of a chunk sees every earlier row, so that part needs no mask, and its own rows are the square causal case
that kernels know how to halve. The softmax over both is a weighted mean of the two softmaxes (as in ring attention,
arXiv 2310.01889). The backward kernel recomputes probabilities as exp(score - log-sum-exp): given the joint
log-sum-exp and output it returns each part's exact share of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function

from rpfunc.errors import ModelError
from rpfunc.stream.transforms import running_transforms


def can_split(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Returns whether the kernels that report log-sum-exps serve these tensors; `attend` masks where they do not."""
    fits = query.shape[-1] == value.shape[-1] and query.is_cpu and query.dtype == key.dtype == value.dtype
    return fits and all(transform == "Grad" for transform in running_transforms())  # no rule for vmap or jvp


Receive = Callable[[slice, Tensor, Tensor], None]
"""Takes the cotangents of the keys and values of some rows: (their places, (B, rows, K, d), (B, rows, K, d))."""


def split_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, receive: Receive | None = None) -> Tensor:
    """Returns bottom-right causal attention of (B, n, H, d) queries over (B, m, K, d) keys and values, 1 < n < m.

    With `receive` the cotangents of keys and values go there, a run of rows at a time, and never exist whole.
    """
    parts = (query, key, value)
    if has_torch_function(parts):  # so that a context can keep the result, or put a kept one here
        overridden: Tensor = handle_torch_function(split_attention, parts, *parts, scale, receive)
        return overridden
    return attention_with_sums(*parts, scale, receive)[0]


def attention_with_sums(
    query: Tensor, key: Tensor, value: Tensor, scale: float, receive: Receive | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (`split_attention`, each query's log-sum-exp of scores (B, H, n))."""
    result: tuple[Tensor, Tensor] = _SplitAttention.apply(query, key, value, scale, receive, None)  # type: ignore[no-untyped-call]
    return result


def known_attention(
    result: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, scale: float, receive: Receive | None
) -> Tensor:
    """Returns result[0], what `attention_with_sums` gave for the same numbers, as a function of them."""
    # torch.func would take a tensor that is handed on for an input: in a function it is out of its sight
    output: Tensor = _SplitAttention.apply(query, key, value, scale, receive, lambda: result)[0]  # type: ignore[no-untyped-call]
    return output


KEYS = 2048
"""Earlier rows taken at a time: the kernel's own results are never larger."""


class _SplitAttention(Function):
    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        receive: Receive | None,
        known: Callable[[], tuple[Tensor, Tensor]] | None,
    ) -> tuple[Tensor, Tensor]:
        if known is not None:
            return known()
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        own, earlier, groups = _own(query, key, value), _earlier(query, key, value), query.shape[2] // key.shape[2]
        output, joint = forward(*own, is_causal=True, scale=scale)
        for part in earlier:
            more, its_own = forward(*part[1:], scale=scale)
            more = rearrange(more, "b h (g t) d -> b (h g) t d", g=groups)
            its_own = rearrange(its_own, "b h (g t) -> b (h g) t", g=groups)
            before, joint = joint, torch.logaddexp(joint, its_own)
            output = output * torch.exp(before - joint)[..., None] + more * torch.exp(its_own - joint)[..., None]
        return rearrange(output.to(query.dtype), "b h t d -> b t h d"), joint

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, ctx.scale, ctx.receive, _ = inputs
        ctx.save_for_backward(query, key, value, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: None) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor | None, ...] = _Backward.apply(cotangent, *ctx.saved_tensors, ctx.scale, ctx.receive)  # type: ignore[no-untyped-call]
        return *gradients, None, None, None


class _Backward(Function):
    @staticmethod
    def forward(
        cotangent: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        joint: Tensor,
        scale: float,
        receive: Receive | None,
    ) -> tuple[Tensor | None, ...]:
        groups, num_queries = query.shape[2] // key.shape[2], query.shape[1]
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        spread, gather = "b t h d -> b h t d", "b h t d -> b t h d"
        dquery, *downs = backward(
            rearrange(cotangent, spread),
            *_own(query, key, value),
            rearrange(output, spread),
            joint,
            0.0,
            True,
            scale=scale,
        )
        dquery = rearrange(dquery, gather)
        whole = () if receive is not None else (torch.empty_like(key), torch.empty_like(value))

        def write(rows: slice, *parts: Tensor) -> None:
            for place, part in zip(whole, parts, strict=True):
                place[:, rows] = part

        receive = receive or write
        own_rows = slice(key.shape[1] - num_queries, key.shape[1])
        receive(own_rows, *(rearrange(down, "b (h g) t d -> b t h g d", g=groups).sum(3) for down in downs))
        fold = "b t (h g) d -> b h (g t) d"
        folded = [rearrange(part, fold, g=groups) for part in (cotangent, output)]
        joint = rearrange(joint, "b (h g) t -> b h (g t)", g=groups)
        for rows, *part in _earlier(query, key, value):
            dq, dk, dv = backward(folded[0], *part, folded[1], joint, 0.0, False, scale=scale)
            dquery = dquery + rearrange(dq, "b h (g t) d -> b t (h g) d", t=num_queries)
            receive(rows, rearrange(dk, gather), rearrange(dv, gather))
        return dquery, *(whole or (None, None))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, ...]:
        # torch.func takes no notice of `once_differentiable`: the second derivative would be zeros
        raise ModelError(
            "attend: the kernels have no second derivative; where torch.func.grad or torch.func.vjp takes the first, "
            "attention is computed in a way that has"
        )


def _earlier(query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yields blocks of the rows before the chunk: (their places, queries, keys, values).

    The queries of a group become further rows of one head, so that keys and values are never repeated.
    """
    before = key.shape[1] - query.shape[1]
    q = rearrange(query, "b t (h g) d -> b h (g t) d", h=key.shape[2])
    for start in range(0, before, KEYS):
        places = slice(start, min(start + KEYS, before))
        k, v = (rearrange(part[:, places], "b t h d -> b h t d") for part in (key, value))
        yield places, q, k, v


def _own(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (queries, keys, values) of the chunk's own rows, a key head for each query head."""
    before, groups = key.shape[1] - query.shape[1], query.shape[2] // key.shape[2]
    k, v = (repeat(part[:, before:], "b t h d -> b (h g) t d", g=groups) for part in (key, value))
    return rearrange(query, "b t h d -> b h t d"), k, v
