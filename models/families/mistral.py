"""Mistral (arXiv 2310.06825): Llama with a window in every layer."""

from __future__ import annotations

from rpfunc.models.families.family import ATTENTION, LLAMA_BUFFERS, MLP, MLP_NORM, Description, Family
from rpfunc.models.families.fields import Fields
from rpfunc.models.families.llama import describe
from rpfunc.models.families.reading import read_shape, read_window


def read(fields: Fields) -> Description:
    """Returns the model of a config of type `mistral`."""
    shape = read_shape(fields, 131_072, kv_heads=8, may_be_null=("head_dim",))
    windows = [read_window(fields, 4096)] * shape.layers
    return describe(fields, shape, ATTENTION | MLP_NORM | MLP, windows, fields.rate("attention_dropout"))


FAMILY = Family(read, "model.", LLAMA_BUFFERS)
