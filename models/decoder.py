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
from jaxtyping import Float
from torch import Tensor

from rpfunc import random
from rpfunc.errors import ModelError
from rpfunc.model import Model
from rpfunc.models import checks, feedforward, norms, rope, transformer


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
        sizes = {name: getattr(self, name) for name in ("vocabulary", "width", "kv_heads", "head_size", "mlp_width")}
        problems = [
            *checks.counts(sizes),
            *checks.counts({"layers": self.layers}, most=checks.MOST_LAYERS),
            *checks.counts({"heads": self.heads}),
        ]
        if not checks.counts({"heads": self.heads, "kv_heads": self.kv_heads}) and self.heads % self.kv_heads:
            problems.append(f"heads is {self.heads}, it must be a multiple of kv_heads {self.kv_heads}")
        if not checks.counts({"head_size": self.head_size}) and self.head_size % 2:
            problems.append(f"head_size is {self.head_size}, rotary positions need it even")
        problems += [
            *checks.positives({"rope_theta": self.rope_theta, "norm_epsilon": self.norm_epsilon}),
            *checks.positives({} if self.deviation is None else {"deviation": self.deviation}),
            *checks.rates({"dropout": self.dropout}),
            *checks.flags({"qk_norm": self.qk_norm, "bias": self.bias, "tied": self.tied}),
        ]
        if problems:
            raise ModelError.listing("decoder", problems)


def model(config: DecoderConfig) -> Model:
    """Returns the decoder: layers `embedding`, `block0` ..., `head`. Reads row leaf `tokens` (B, T) int64; gives logits
    (B, T, V).
    """
    block = transformer.Block(
        head_size=config.head_size,
        norm=norms.rms(config.norm_epsilon),
        mlp=feedforward.gated(F.silu),
        rope=rope.rotary(config.rope_theta, config.head_size),
        dropout=config.dropout,
    )
    return transformer.model([block] * config.layers, transformer.Ends(block.norm, config.tied))


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


def rotate(
    x: Float[Tensor, "batch rows heads size"], first_row: int, theta: float
) -> Float[Tensor, "batch rows heads size"]:
    """Returns x with each pair (i, i + size/2) of row t turned by the angle t * theta^(-2i/size)."""
    rows = torch.arange(first_row, first_row + x.shape[1], device=x.device)[None]
    return rope.rotate(x, rows, rope.rotary(theta, x.shape[-1]))
