"""Qwen3 (arXiv 2505.09388): norms on query and key heads, and a head size of its own."""

from __future__ import annotations

from rpfunc.models.families.family import (
    ATTENTION,
    LLAMA_BUFFERS,
    MLP,
    MLP_NORM,
    OUTPUT_BIAS,
    QK_NORM,
    QKV_BIAS,
    Description,
    Family,
)
from rpfunc.models.families.fields import Fields
from rpfunc.models.families.llama import describe
from rpfunc.models.families.qwen2 import later_windows
from rpfunc.models.families.reading import read_shape
from rpfunc.models.families.stored import Row


def read(fields: Fields) -> Description:
    """Returns the model of a config of type `qwen3`."""
    shape = read_shape(fields, 32_768, kv_heads=32, head_size=128, may_be_null=("num_key_value_heads",))
    windows = later_windows(fields, shape.layers)
    rows = attention(fields) | MLP_NORM | MLP
    return describe(fields, shape, rows, windows, fields.rate("attention_dropout"))


def attention(fields: Fields) -> dict[str, Row]:
    """Returns the rows of a Qwen3 attention, with biases where the config asks for them."""
    biases = QKV_BIAS | OUTPUT_BIAS if fields.flag("attention_bias") else {}
    return ATTENTION | QK_NORM | biases


FAMILY = Family(read, "model.", LLAMA_BUFFERS)
