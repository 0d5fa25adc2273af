"""What a family is to the rest: a reading of its config, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rpfunc.model import Layer
from rpfunc.models.families.fields import Fields
from rpfunc.models.families.stored import Row, Table, table


class Description(NamedTuple):
    """A model of a family, and how checkpoints store it."""

    layers: tuple[Layer, ...]
    tables: tuple[Table, ...]
    """Ways of storing the parameters; the first is written."""


class Family(NamedTuple):
    """A kind of model that checkpoints name by `model_type`."""

    read: Callable[[Fields], Description]
    prefix: str
    """Of all names but the head's; files of a model without its head leave it out."""
    buffers: str = r"$^"
    """A regular expression of stored tensors that are no parameters."""


LLAMA_BUFFERS = r".*\.rotary_emb\.inv_freq"

# V vocabulary, W width, H heads, D head size, Q and K widths of all queries and keys, M width of the MLP's hidden layer

ATTENTION: dict[str, Row] = {
    "attention.norm": ("input_layernorm.weight", "W"),
    "attention.query": ("self_attn.q_proj.weight", "Q W"),
    "attention.key": ("self_attn.k_proj.weight", "K W"),
    "attention.value": ("self_attn.v_proj.weight", "K W"),
    "attention.output": ("self_attn.o_proj.weight", "W Q"),
}
QKV_BIAS: dict[str, Row] = {
    "attention.query_bias": ("self_attn.q_proj.bias", "Q"),
    "attention.key_bias": ("self_attn.k_proj.bias", "K"),
    "attention.value_bias": ("self_attn.v_proj.bias", "K"),
}
OUTPUT_BIAS: dict[str, Row] = {"attention.output_bias": ("self_attn.o_proj.bias", "W")}
QK_NORM: dict[str, Row] = {
    "attention.query_norm": ("self_attn.q_norm.weight", "D"),
    "attention.key_norm": ("self_attn.k_norm.weight", "D"),
}
MLP_NORM: dict[str, Row] = {"mlp.norm": ("post_attention_layernorm.weight", "W")}
MLP: dict[str, Row] = {
    "mlp.gate": ("mlp.gate_proj.weight", "M W"),
    "mlp.up": ("mlp.up_proj.weight", "M W"),
    "mlp.down": ("mlp.down_proj.weight", "W M"),
}
MLP_BIAS: dict[str, Row] = {
    "mlp.gate_bias": ("mlp.gate_proj.bias", "M"),
    "mlp.up_bias": ("mlp.up_proj.bias", "M"),
    "mlp.down_bias": ("mlp.down_proj.bias", "W"),
}


def llama_table(blocks: list[dict[str, Row]], sizes: dict[str, int], tied: bool) -> Table:
    """Returns the table of blocks of these rows between an embedding, a norm and a head named as in Llama."""
    ends: dict[str, Row] = {"embedding": ("model.embed_tokens.weight", "V W"), "norm": ("model.norm.weight", "W")}
    if not tied:
        ends["head"] = ("lm_head.weight", "V W")
    found = table(ends, sizes)
    for index, rows in enumerate(blocks):
        found += table(rows, sizes, path=(f"block{index}",), prefix=f"model.layers.{index}.")
    return found
