"""Attention of a run of queries over the keys and values that they may see."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rpfunc.errors import ModelError
from rpfunc.stream.attention_checks import misfits
from rpfunc.stream.split_attention import can_split, split_attention
from rpfunc.stream.transforms import is_nested

BLOCK = 512
"""Queries that share one mask: no mask is larger than BLOCK x keys, however many queries there are."""


def attend(
    query: Float[Tensor, "batch queries heads size"],
    key: Float[Tensor, "batch keys kv_heads size"],
    value: Float[Tensor, "batch keys kv_heads value_size"],
    *,
    causal: bool = True,
    window: int | None = None,
    query_segments: Int[Tensor, "batch queries"] | None = None,
    key_segments: Int[Tensor, "batch keys"] | None = None,
    visible: Bool[Tensor, "batch keys"] | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> Float[Tensor, "batch queries heads value_size"]:
    """Returns softmax(scale * query key^T) value over the keys that each query sees; heads share kv_heads in groups.

    The queries are the *last* rows among the keys (aligned at the bottom right), query i being row
    keys - queries + i. It sees a row if all of these hold:
      causal             the row is not after its own
      window             the row is one of the last `window` up to its own, which counts
      query/key_segments the row is of the same segment (packed documents; give both)
      visible            the row is visible at all (padding is not)
    A query that sees nothing gets zeros, and gives none but zero gradients; keys and values that are not `visible` may
    hold anything, nan and inf too (queries may not: a row that is not visible still sees others). scale, above 0:
    1 / sqrt(size) by default.
    soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2, arXiv 2408.00118). sinks: a further score for
    each head that takes part in the softmax and has no value (GPT-OSS).

    Keys that no query of a block may see, before the window or after the block, cost nothing. With sinks or soft_cap,
    and in a derivative of a derivative (a layer that takes a gradient itself), a block's scores exist at once, else
    never. Raises ModelError listing all that does not fit.
    """
    problems = misfits(query, key, value, causal, window, query_segments, key_segments, visible, sinks, soft_cap, scale)
    if problems:
        raise ModelError.listing("attend", problems)
    num_queries, num_keys = query.shape[1], key.shape[1]
    if not query.shape[0] or not num_queries or not num_keys or not value.shape[-1]:
        return query.new_zeros(*query.shape[:3], value.shape[-1])  # kernels divide by some of these numbers
    if visible is not None:  # a weight of 0 does not undo a nan
        key, value = (part.masked_fill(~visible[..., None, None], 0.0) for part in (key, value))
    if window == 1 and key_segments is None and visible is None and sinks is None:
        # a softmax of one score is 1, and its gradient is zero: kernels leave what rounding makes of it
        return repeat(
            value[:, num_keys - num_queries :], "b t h d -> b t (h g) d", g=query.shape[2] // key.shape[2]
        ).clone()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # kernels' derivatives have none of their own
    spelled_out = sinks is not None or soft_cap is not None or is_nested(query, key, value)
    size, value_size = query.shape[-1], value.shape[-1]
    if size != value_size and not spelled_out:  # kernels that hold no scores want equal sizes: zeros change nothing
        query, key, value = (F.pad(part, (0, max(size, value_size) - part.shape[-1])) for part in (query, key, value))
    plain = window is None and key_segments is None and visible is None and not spelled_out
    if plain and (not causal or num_queries in (1, num_keys)):
        return _sdpa(query, key, value, None, scale, is_causal=causal and num_queries > 1)[..., :value_size]
    if plain and can_split(query, key, value):
        return split_attention(query, key, value, scale)[..., :value_size]
    outputs = []
    for start in range(0, num_queries, BLOCK):
        stop = min(start + BLOCK, num_queries)
        first, last = num_keys - num_queries + start, num_keys - num_queries + stop  # the block's own rows
        low = max(0, first - window + 1) if window is not None else 0
        high = last if causal else num_keys
        mask = _mask(
            Rows(first, last, low, high, query.device),
            causal,
            window,
            None if query_segments is None else query_segments[:, start:stop],
            None if key_segments is None else key_segments[:, low:high],
            None if visible is None else visible[:, low:high],
        )
        block = query[:, start:stop], key[:, low:high], value[:, low:high]
        if spelled_out:
            outputs.append(_softmax_attention(*block, mask, scale, sinks, soft_cap))
        else:
            outputs.append(_sdpa(*block, mask, scale)[..., :value_size])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class Rows(NamedTuple):
    """Rows first to last as queries, rows low to high as keys."""

    first: int
    last: int
    low: int
    high: int
    device: torch.device


def _mask(
    rows: Rows,
    causal: bool,
    window: int | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    visible: Tensor | None,
) -> Tensor | None:
    """Returns which query sees which key, (1 or B, queries, keys); None: all see all."""
    queries = torch.arange(rows.first, rows.last, device=rows.device)[:, None]
    keys = torch.arange(rows.low, rows.high, device=rows.device)
    conditions = []
    if causal and rows.high - 1 > rows.first:
        conditions.append((keys <= queries)[None])
    if window is not None and rows.last - 1 - rows.low >= window:
        conditions.append((queries - keys < window)[None])
    if query_segments is not None and key_segments is not None:
        conditions.append(query_segments[:, :, None] == key_segments[:, None])
    if visible is not None:
        conditions.append(visible[:, None].expand(-1, len(queries), -1))
    return reduce(torch.logical_and, conditions) if conditions else None


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool = False
) -> Tensor:
    groups, num_queries = query.shape[2] // key.shape[2], query.shape[1]
    if is_causal:
        # the square causal kernel wants a key head for each query head
        k, v = (repeat(part, "b t h d -> b (h g) t d", g=groups) for part in (key, value))
        output = F.scaled_dot_product_attention(
            rearrange(query, "b t h d -> b h t d"), k, v, is_causal=True, scale=scale
        )
        return rearrange(output, "b h t d -> b t h d")
    # The queries of a group become further rows of one head, so that keys and values are never repeated.
    q = rearrange(query, "b t (h g) d -> b h (g t) d", g=groups)
    k, v = (rearrange(part, "b t h d -> b h t d") for part in (key, value))
    if mask is None:
        output = F.scaled_dot_product_attention(q, k, v, scale=scale)
    else:
        anything = mask.any(dim=-1)
        # A row that sees nothing is computed as if it saw all, and then set to zero: no 0/0 on the way.
        whole = repeat(mask | ~anything[..., None], "b t k -> b 1 (g t) k", g=groups)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=whole, scale=scale)
        output = output.where(repeat(anything, "b t -> b 1 (g t) 1", g=groups), 0.0)
    return rearrange(output, "b h (g t) d -> b t (h g) d", t=num_queries)


def _softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    soft_cap: float | None,
) -> Tensor:
    groups = query.shape[2] // key.shape[2]
    q = rearrange(query, "b t (h g) d -> b h g t d", g=groups)
    scores = torch.einsum("bhgtd,bkhd->bhgtk", q, key) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    seen = None if mask is None else rearrange(mask, "b t k -> b 1 1 t k")
    nothing = None if seen is None else ~seen.any(dim=-1, keepdim=True)
    if seen is not None and nothing is not None:
        scores = scores.masked_fill(~(seen | nothing), -torch.inf)
    if sinks is not None:
        sink = rearrange(sinks, "(h g) -> 1 h g 1 1", g=groups).to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), dim=-1).to(value.dtype)
    output = torch.einsum("bhgtk,bkhd->bhgtd", weights[..., : key.shape[1]], value)
    if nothing is not None:
        output = output.where(~nothing, 0.0)
    return rearrange(output, "b h g t d -> b t (h g) d")
