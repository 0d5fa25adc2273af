"""Attention written a second time, densely: whole T x T boolean masks, loops over examples and heads, float64.

Shares nothing with rpfunc. Queries are the last rows among the keys.
"""

import math

import torch


def mask(num_queries, num_keys, *, causal=True, window=None, segments=None, visible=None):
    """(queries, keys) of one example; segments and visible are lists over all keys."""
    rows = []
    for query in range(num_keys - num_queries, num_keys):
        row = []
        for key in range(num_keys):
            sees = not causal or key <= query
            sees = sees and (window is None or query - key < window)
            sees = sees and (segments is None or segments[query] == segments[key])
            row.append(sees and (visible is None or visible[key]))
        rows.append(row)
    return torch.tensor(rows)


def attention(query, key, value, *, seen, sink=None, soft_cap=None, scale=None):
    """One head, (T, size) each: a masked softmax in float64; a row that sees nothing gives zeros."""
    query, key, value = query.double(), key.double(), value.double()
    scores = query @ key.T * (1 / math.sqrt(query.shape[1]) if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    outputs = []
    for row, visible in zip(scores, seen, strict=True):
        if not visible.any():
            outputs.append(value[0] * 0)
            continue
        chosen = row[visible]
        largest = chosen.max() if sink is None else torch.maximum(chosen.max(), sink.double())
        weights = (chosen - largest.detach()).exp()
        total = weights.sum() if sink is None else weights.sum() + (sink.double() - largest.detach()).exp()
        outputs.append(weights @ value[visible] / total)
    return torch.stack(outputs)


def attend(query, key, value, *, causal=True, window=None, segments=None, visible=None, sinks=None, **options):
    """(B, T, H, size), (B, S, K, size), (B, S, K, value_size) -> (B, T, H, value_size); segments, visible (B, S)."""
    repeats = query.shape[2] // key.shape[2]
    examples = []
    for index in range(len(query)):
        seen = mask(
            query.shape[1],
            key.shape[1],
            causal=causal,
            window=window,
            segments=None if segments is None else segments[index].tolist(),
            visible=None if visible is None else visible[index].tolist(),
        )
        heads = [
            attention(
                query[index, :, head],
                key[index, :, head // repeats],
                value[index, :, head // repeats],
                seen=seen,
                sink=None if sinks is None else sinks[head],
                **options,
            )
            for head in range(query.shape[2])
        ]
        examples.append(torch.stack(heads, dim=1))
    return torch.stack(examples)


def plain(query, key, value, *, segments=None, visible=None, causal=True, window=None, sinks=None, soft_cap=None):
    """The same in the inputs' own dtype, as plain torch code would have it: the yardstick for low precision.

    Every query must see something.
    """
    repeats = query.shape[2] // key.shape[2]
    q, k, v = (leaf.transpose(1, 2) for leaf in (query, key, value))
    k, v = (leaf.repeat_interleave(repeats, dim=1) for leaf in (k, v))
    seen = torch.stack(
        [
            mask(
                query.shape[1],
                key.shape[1],
                causal=causal,
                window=window,
                segments=None if segments is None else segments[index].tolist(),
                visible=None if visible is None else visible[index].tolist(),
            )
            for index in range(len(query))
        ]
    )[:, None]
    scores = q @ k.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
    return (weights @ v).transpose(1, 2)
