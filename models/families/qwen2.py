"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on queries, keys and values, and windows in later layers."""

from __future__ import annotations

from rpfunc.models.families.family import ATTENTION, LLAMA_BUFFERS, MLP, MLP_NORM, QKV_BIAS, Description, Family
from rpfunc.models.families.fields import Fields
from rpfunc.models.families.llama import describe
from rpfunc.models.families.reading import FULL, SLIDING, read_shape, read_window, read_windows


def read(fields: Fields) -> Description:
    """Returns the model of a config of type `qwen2`."""
    shape = read_shape(fields, 32_768, kv_heads=32, may_be_null=("num_key_value_heads",))
    windows = later_windows(fields, shape.layers)
    return describe(fields, shape, ATTENTION | QKV_BIAS | MLP_NORM | MLP, windows, fields.rate("attention_dropout"))


def later_windows(fields: Fields, layers: int) -> list[int | None]:
    """Returns each layer's window: `sliding_window`, if in use at all, from layer `max_window_layers` on."""
    used = fields.flag("use_sliding_window")
    first = fields.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        fields.refuse("max_window_layers", first, "it must be an integer of at least 0")
        first = 0
    fields.get("sliding_window")
    window = read_window(fields, 4096) if used else None
    kinds = [SLIDING if window is not None and index >= first else FULL for index in range(layers)]
    return read_windows(fields, layers, kinds, window)


FAMILY = Family(read, "model.", LLAMA_BUFFERS)
