"""Mistral (arXiv 2310.06825): Llama with a window in every layer."""

from __future__ import annotations

from rpfunc.models.families.family import ATTENTION, LLAMA_BUFFERS, MLP, MLP_NORM, Description, Family
from rpfunc.models.families.fields import Fields
from rpfunc.models.families.llama import describe
from rpfunc.models.families.reading import read_shape


def read(fields: Fields) -> Description:
    """Returns the model of a config of type `mistral`."""
    shape = read_shape(fields, kv_heads=8)
    window = None
    if fields.get("sliding_window") is not None or not fields.has("sliding_window"):
        window = fields.size("sliding_window", 4096)
    return describe(fields, shape, ATTENTION | MLP_NORM | MLP, [window] * shape.layers)


FAMILY = Family(read, "model.", LLAMA_BUFFERS)
