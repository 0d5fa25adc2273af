"""Attention of a chunk of queries over the keys and values that they may see."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor


def attend(
    query: Float[Tensor, "batch queries heads size"],
    key: Float[Tensor, "batch keys kv_heads size"],
    value: Float[Tensor, "batch keys kv_heads size"],
    *,
    causal: bool = True,
) -> Float[Tensor, "batch queries heads size"]:
    """Returns softmax(query key^T / sqrt(size)) value; heads are dealt to kv_heads in equal, contiguous groups.

    Causal: the queries are the last rows among the keys, so query i sees keys up to keys - queries + i (aligned at
    the bottom right, unlike `scaled_dot_product_attention(is_causal=True)`, which aligns at the top left). The mask is
    queries x keys, never keys x keys. Cost: queries * keys * heads * size * 4 FLOPs, no scores kept.
    """
    num_queries, num_keys, groups = query.shape[1], key.shape[1], query.shape[2] // key.shape[2]
    q = rearrange(query, "b t h d -> b h t d")
    k, v = (repeat(part, "b t h d -> b (h g) t d", g=groups) for part in (key, value))
    mask = None
    if causal and 1 < num_queries < num_keys:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and num_queries == num_keys)
    return rearrange(output, "b h t d -> b t h d")
