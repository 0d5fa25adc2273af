"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU; Llama's shape.

Sources: RMSNorm (arXiv 1910.07467), RoPE (arXiv 2104.09864, halves rotated against each other), grouped-query
attention (arXiv 2305.13245), SwiGLU (arXiv 2002.05202), q/k-norm as in Qwen3 (arXiv 2505.09388).
Shapes: B batch, T rows, W width, H heads, K key-value heads, D head size, M MLP width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from rpfunc import random
from rpfunc.batch import Batch
from rpfunc.errors import BatchError, ModelError
from rpfunc.model import Form, Layer, Model
from rpfunc.stream import attend, attending, rowwise


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. Raises ModelError listing every value that cannot work."""

    vocabulary: int = 256
    """Different tokens."""
    width: int = 128
    """Of the residual stream."""
    layers: int = 4
    """Blocks of attention and MLP."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; each serves heads / kv_heads query heads."""
    head_size: int = 32
    """Of a query, key or value; even."""
    mlp_width: int = 384
    """Of the MLP's hidden layer."""
    rope_theta: float = 10_000.0
    """Base of the rotary positions' wavelengths."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in every norm."""
    qk_norm: bool = False
    """Norms on each query and key head (as in Qwen3)."""
    bias: bool = False
    """Biases on the query, key and value projections (as in Qwen2)."""
    tied: bool = True
    """The head is the embedding: one subtree, one gradient."""
    deviation: float | None = 0.02
    """Of initial weights (GPT-2); none: 1 / sqrt(inputs), which keeps every layer's outputs as large as its inputs."""
    dropout: float = 0.0
    """On the output of attention and MLP; active where the batch has a constant `key`."""

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "width", "layers", "heads", "kv_heads", "head_size", "mlp_width")
        problems = [
            f"{name} is {getattr(self, name)}, it must be at least 1" for name in sizes if getattr(self, name) < 1
        ]
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            problems.append(f"heads is {self.heads}, it must be a multiple of kv_heads {self.kv_heads}")
        if self.head_size % 2:
            problems.append(f"head_size is {self.head_size}, rotary positions need it even")
        for name in ("rope_theta", "norm_epsilon", "deviation"):
            if getattr(self, name) is not None and not 0.0 < getattr(self, name) < math.inf:
                problems.append(f"{name} is {getattr(self, name)}, it must be positive and finite")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}, it must be at least 0 and below 1")
        if problems:
            raise ModelError.listing("decoder", problems)


def model(config: DecoderConfig) -> Model:
    """Returns the decoder: layers `embedding`, `block0` ..., `head`. Reads row leaf `tokens` (B, T) int64; gives logits
    (B, T, V).
    """
    embedding = Layer("embedding", rowwise(_embed), "embedding")
    blocks = [Layer(f"block{i}", _block(config, f"block{i}"), f"block{i}") for i in range(config.layers)]
    projection = "embedding" if config.tied else "head"
    head = Layer("head", rowwise(_head(config)), {"norm": "norm", "projection": projection})
    return Model((embedding, *blocks, head))


def init(config: DecoderConfig, key: random.Key, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns parameters: weights (out, in) normal of the config's deviation, those that write into the residual stream
    smaller by sqrt(2 layers); embedding and head of deviation 0.02; norms 1, biases 0. Source: GPT-2's initialisation.
    """
    kv_width, q_width = config.kv_heads * config.head_size, config.heads * config.head_size
    residual = 1 / math.sqrt(2 * config.layers)

    def weight(name: str, out: int, inputs: int, scale: float = 1.0) -> Tensor:
        drawn = random.normal(random.fold_in(key, name), (out, inputs), torch.float64)
        deviation = 1 / math.sqrt(inputs) if config.deviation is None else config.deviation
        return (drawn * (deviation * scale)).to(dtype)

    def block(name: str) -> dict[str, Any]:
        attention = {
            "norm": torch.ones(config.width, dtype=dtype),
            "query": weight(f"{name}.query", q_width, config.width),
            "key": weight(f"{name}.key", kv_width, config.width),
            "value": weight(f"{name}.value", kv_width, config.width),
            "output": weight(f"{name}.output", config.width, q_width, residual),
        }
        if config.bias:
            sizes = {"query_bias": q_width, "key_bias": kv_width, "value_bias": kv_width}
            attention |= {bias: torch.zeros(size, dtype=dtype) for bias, size in sizes.items()}
        if config.qk_norm:
            attention |= {norm: torch.ones(config.head_size, dtype=dtype) for norm in ("query_norm", "key_norm")}
        mlp = {
            "norm": torch.ones(config.width, dtype=dtype),
            "gate": weight(f"{name}.gate", config.mlp_width, config.width),
            "up": weight(f"{name}.up", config.mlp_width, config.width),
            "down": weight(f"{name}.down", config.width, config.mlp_width, residual),
        }
        return {"attention": attention, "mlp": mlp}

    def table(name: str) -> Tensor:
        drawn = random.normal(random.fold_in(key, name), (config.vocabulary, config.width), torch.float64)
        return (drawn * 0.02).to(dtype)

    params: dict[str, Any] = {"embedding": table("embedding"), "norm": torch.ones(config.width, dtype=dtype)}
    params |= {f"block{i}": block(f"block{i}") for i in range(config.layers)}
    return params if config.tied else params | {"head": table("head")}


def rms_norm(
    x: Float[Tensor, "*rows width"], scale: Float[Tensor, " width"], epsilon: float
) -> Float[Tensor, "*rows width"]:
    """Returns x / sqrt(mean(x^2) + epsilon) * scale over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), scale, epsilon)


def rotate(
    x: Float[Tensor, "batch rows heads size"], first_row: int, theta: float
) -> Float[Tensor, "batch rows heads size"]:
    """Returns x with each pair (i, i + size/2) of row t turned by the angle t * theta^(-2i/size)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    rows = torch.arange(first_row, first_row + x.shape[1], device=x.device, dtype=torch.float64)
    angles = rearrange(torch.outer(rows, frequencies), "t d -> t 1 d")
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _embed(embedding: Tensor, x: tuple[()], batch: Batch) -> Tensor:
    del x
    tokens = batch.row["tokens"]
    try:
        return F.embedding(tokens, embedding)
    except IndexError:  # asked afterwards, since to ask before would read all tokens once more
        unknown = tokens[(tokens < 0) | (tokens >= len(embedding))]
        raise BatchError(
            f"batch: row leaf 'tokens' holds {unknown[0].item()}; the model's vocabulary is 0 to {len(embedding) - 1}"
        ) from None


def _head(config: DecoderConfig) -> Any:
    def head(params: dict[str, Tensor], x: Tensor, batch: Batch) -> Tensor:
        del batch
        return F.linear(rms_norm(x, params["norm"], config.norm_epsilon), params["projection"])

    return head


def _block(config: DecoderConfig, name: str) -> Form:
    def project(params: dict[str, Tensor], part: str, hidden: Tensor) -> Tensor:
        projected = F.linear(hidden, params[part], params.get(f"{part}_bias"))
        heads = rearrange(projected, "b t (h d) -> b t h d", d=config.head_size)
        norm = params.get(f"{part}_norm")
        return heads if norm is None else rms_norm(heads, norm, config.norm_epsilon)

    def drop(x: Tensor, place: str, batch: Batch) -> Tensor:
        if config.dropout == 0.0 or "key" not in batch.constant:
            return x
        return random.dropout(x, config.dropout, random.fold_in(batch.constant["key"], f"{name}.{place}"), batch)

    def kv(params: dict[str, Any], x: Tensor, batch: Batch) -> dict[str, Tensor]:
        attention = params["attention"]
        hidden = rms_norm(x, attention["norm"], config.norm_epsilon)
        keys = rotate(project(attention, "key", hidden), batch.first_row, config.rope_theta)
        return {"key": keys, "value": project(attention, "value", hidden)}

    def rows(params: dict[str, Any], x: Tensor, kv: dict[str, Tensor], batch: Batch) -> Tensor:
        attention, mlp = params["attention"], params["mlp"]
        hidden = rms_norm(x, attention["norm"], config.norm_epsilon)
        queries = rotate(project(attention, "query", hidden), batch.first_row, config.rope_theta)
        attended = rearrange(attend(queries, kv["key"], kv["value"]), "b t h d -> b t (h d)")
        x = x + drop(F.linear(attended, attention["output"]), "attention", batch)
        hidden = rms_norm(x, mlp["norm"], config.norm_epsilon)
        gated = F.silu(F.linear(hidden, mlp["gate"])) * F.linear(hidden, mlp["up"])
        return x + drop(F.linear(gated, mlp["down"]), "mlp", batch)

    return attending(kv, rows)
