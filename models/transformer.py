"""The decoder that all families share: a block's stage functions, and the layers of a whole model.

What parameters say for themselves is not asked for again: a bias acts where there is one, and so do norms on query and
key heads, norms after attention and MLP, and attention sinks.
Sources: grouped-query attention (arXiv 2305.13245), norms on queries and keys as in Qwen3 (arXiv 2505.09388), after
attention and MLP as in Gemma 2 (arXiv 2408.00118), sinks as in GPT-OSS (arXiv 2508.10925).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from rpfunc import random
from rpfunc.batch import Batch
from rpfunc.errors import BatchError, ModelError
from rpfunc.model import Form, Layer, Model
from rpfunc.models.feedforward import RowFunction
from rpfunc.models.norms import Norm
from rpfunc.models.rope import Rope, rotate
from rpfunc.stream import attend, attending, rowwise


@dataclass(frozen=True)
class Block:
    """What a block's parameters do not say."""

    head_size: int
    """Of a query, key or value."""
    norm: Norm
    """Before attention and MLP; on query and key heads and after attention and MLP, where there are such."""
    mlp: RowFunction
    """What follows attention."""
    rope: Rope | None = None
    """Rotary positions of queries and keys."""
    window: int | None = None
    """Rows that a row sees, itself included."""
    scale: float | None = None
    """Of scores; None: 1 / sqrt(head_size)."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(score / soft_cap)."""
    dropout: float = 0.0
    """On the output of attention and MLP; active where the batch has a constant `key`."""
    weight_dropout: float = 0.0
    """On attention weights: a batch with a `key` is refused, since these weights never exist as a whole."""


@dataclass(frozen=True)
class Ends:
    """What stands before the first block and after the last."""

    norm: Norm
    """After the last block."""
    tied: bool
    """The head is the embedding: one subtree, one gradient."""
    positions: bool = False
    """A learned vector for each row's place is added to its token's."""
    scale: float | None = None
    """What embeddings are multiplied by."""
    padding: int | None = None
    """A token that gives its embedding no gradient."""
    dropout: float = 0.0
    """On embeddings; active where the batch has a constant `key`."""
    soft_cap: float | None = None
    """Logits become soft_cap * tanh(logit / soft_cap)."""


def layers(blocks: Sequence[Block], ends: Ends) -> tuple[Layer, ...]:
    """Returns layers `embedding`, `block0` ..., `head`. They read row leaf `tokens` (B, T) int64 and give logits
    (B, T, V).

    Subtrees: `embedding` (V, W), `positions` (P, W), `block0` ... of {"attention": {norm, query, key, value, output,
    ...}, "mlp": {norm, ...}} with weights (out, in), `norm`, and `head` (V, W) unless tied.
    """
    return stack([Layer(f"block{i}", block(each, f"block{i}"), f"block{i}") for i, each in enumerate(blocks)], ends)


def stack(middle: Sequence[Layer], ends: Ends) -> tuple[Layer, ...]:
    """Returns layers `embedding`, the given ones from rows (B, T, W) to such rows, and `head`, as `layers` does."""
    reads = {"tokens": "embedding", "positions": "positions"} if ends.positions else "embedding"
    projection = "embedding" if ends.tied else "head"
    return (
        Layer("embedding", rowwise(_embedding(ends)), reads),
        *middle,
        Layer("head", rowwise(_head(ends)), {"norm": "norm", "projection": projection}),
    )


def model(blocks: Sequence[Block], ends: Ends) -> Model:
    """Returns the model of these `layers`."""
    return Model(layers(blocks, ends))


def block(shape: Block, name: str) -> Form:
    """Returns attention and MLP, each added to what came in; `name` keys its random draws."""

    def project(params: dict[str, Any], part: str, hidden: Tensor) -> Tensor:
        projected = F.linear(hidden, params[part], params.get(f"{part}_bias"))
        heads = rearrange(projected, "b t (h d) -> b t h d", d=shape.head_size)
        norm = params.get(f"{part}_norm")
        return heads if norm is None else shape.norm(norm, heads)

    def place(heads: Tensor, batch: Batch) -> Tensor:
        return heads if shape.rope is None else rotate(heads, _places(batch), shape.rope)

    def add(x: Tensor, output: Tensor, params: dict[str, Any], part: str, batch: Batch) -> Tensor:
        norm = params.get("norm_after")
        output = output if norm is None else shape.norm(norm, output)
        return x + _drop(output, shape.dropout, f"{name}.{part}", batch)

    def kv(params: dict[str, Any], x: Tensor, batch: Batch) -> dict[str, Tensor]:
        attention = params["attention"]
        hidden = shape.norm(attention["norm"], x)
        keys = place(project(attention, "key", hidden), batch)
        seen = {"visible": batch.row["visible"]} if "visible" in batch.row else {}
        return {"key": keys, "value": project(attention, "value", hidden), **seen}

    def rows(params: dict[str, Any], x: Tensor, kv: dict[str, Tensor], batch: Batch) -> Tensor:
        if shape.weight_dropout and "key" in batch.constant:
            raise ModelError(
                f"{name}: dropout of attention weights is {shape.weight_dropout}, which is not supported; train with "
                "0, or without a `key` in the batch"
            )
        attention, mlp = params["attention"], params["mlp"]
        hidden = shape.norm(attention["norm"], x)
        queries = place(project(attention, "query", hidden), batch)
        attended = attend(
            queries,
            kv["key"],
            kv["value"],
            window=shape.window,
            visible=kv.get("visible"),
            sinks=attention.get("sinks"),
            soft_cap=shape.soft_cap,
            scale=shape.scale,
        )
        joined = rearrange(attended, "b t h d -> b t (h d)")
        output = F.linear(joined, attention["output"], attention.get("output_bias"))
        x = add(x, output, attention, "attention", batch)
        hidden = shape.norm(mlp["norm"], x)
        return add(x, shape.mlp(mlp, hidden), mlp, "mlp", batch)

    return attending(kv, rows, window=shape.window)


FOREIGN = {
    "input_ids": "'tokens'",
    "attention_mask": "'visible', booleans",
    "position_ids": "'positions'",
}
"""Names that transformers has for row leaves, and ours: padding that nobody reads would be attended to."""


def _embedding(ends: Ends) -> Any:
    def embed(params: Any, x: tuple[()], batch: Batch) -> Tensor:
        del x
        foreign = [f"row leaf {name!r} is not read, give {own}" for name, own in FOREIGN.items() if name in batch.row]
        if foreign:
            raise BatchError.listing("batch", foreign)
        tokens = _whole_numbers(batch, "tokens")
        embedded = _look_up(params["tokens"] if ends.positions else params, tokens)
        if ends.padding is not None:
            embedded = torch.where((tokens == ends.padding)[..., None], embedded.detach(), embedded)
        if ends.scale is not None:
            embedded = embedded * torch.tensor(ends.scale, dtype=embedded.dtype, device=embedded.device)
        if ends.positions:
            embedded = embedded + _positions(params["positions"], batch)
        return _drop(embedded, ends.dropout, "embedding", batch)

    return embed


def _whole_numbers(batch: Batch, name: str) -> Tensor:
    """Returns a row leaf of one whole number a row. Raises BatchError where it is missing or something else."""
    if name not in batch.row:
        raise BatchError(f"batch: has no row leaf {name!r}, which the model reads; int64 (B, T) is needed")
    found: Tensor = batch.row[name]
    if found.dtype not in (torch.int64, torch.int32) or found.dim() != 2:
        raise BatchError(f"batch: row leaf {name!r} is {found.dtype} {tuple(found.shape)}; int64 (B, T) is needed")
    return found


def _look_up(embedding: Tensor, tokens: Tensor) -> Tensor:
    try:
        return F.embedding(tokens, embedding)
    except IndexError:  # asked afterwards, since to ask before would read all tokens once more
        unknown = tokens[(tokens < 0) | (tokens >= len(embedding))]
        raise BatchError(
            f"batch: row leaf 'tokens' holds {unknown[0].item()}; the model's vocabulary is 0 to {len(embedding) - 1}"
        ) from None


def _places(batch: Batch) -> Tensor:
    """Returns each row's place in its own text, (1 or B, T): row leaf `positions`, or the rows' numbers."""
    if "positions" in batch.row:
        return _whole_numbers(batch, "positions")
    device = batch.row["tokens"].device
    return torch.arange(batch.first_row, batch.first_row + batch.num_rows, device=device)[None]


def _positions(positions: Tensor, batch: Batch) -> Tensor:
    places = _places(batch)
    if "positions" in batch.row:
        first, last = (int(each) for each in places.aminmax())
        if first < 0 or last >= len(positions):
            odd = first if first < 0 else last
            raise BatchError(f"batch: row leaf 'positions' holds {odd}; the model's are 0 to {len(positions) - 1}")
    elif batch.first_row + batch.num_rows > len(positions):
        raise BatchError(
            f"batch: has at least {batch.first_row + batch.num_rows} rows; the model has positions for {len(positions)}"
        )
    return positions[places]


def _head(ends: Ends) -> Any:
    def head(params: dict[str, Any], x: Tensor, batch: Batch) -> Tensor:
        del batch
        logits = F.linear(ends.norm(params["norm"], x), params["projection"])
        return logits if ends.soft_cap is None else ends.soft_cap * torch.tanh(logits / ends.soft_cap)

    return head


def _drop(x: Tensor, rate: float, place: str, batch: Batch) -> Tensor:
    if rate == 0.0 or "key" not in batch.constant:
        return x
    return random.dropout(x, rate, random.fold_in(batch.constant["key"], place), batch)
