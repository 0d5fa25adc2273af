"""Gemma 3's text models (arXiv 2503.19786): norms that count from one, before and after; local and global layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rpfunc.models import feedforward, norms, transformer
from rpfunc.models.families.family import (
    ATTENTION,
    LLAMA_BUFFERS,
    MLP,
    OUTPUT_BIAS,
    QK_NORM,
    QKV_BIAS,
    Description,
    Family,
    llama_table,
)
from rpfunc.models.families.fields import Fields
from rpfunc.models.families.reading import (
    FULL,
    SLIDING,
    Shape,
    make_rope,
    read_activation,
    read_shape,
    read_window,
    read_windows,
)
from rpfunc.models.families.stored import Row

NORMS: dict[str, Row] = {
    "attention.norm_after": ("post_attention_layernorm.weight", "W"),
    "mlp.norm": ("pre_feedforward_layernorm.weight", "W"),
    "mlp.norm_after": ("post_feedforward_layernorm.weight", "W"),
}


def read(fields: Fields) -> Description:
    """Returns the model of a config of type `gemma3_text`."""
    shape = read_shape(fields, 131_072, kv_heads=4, head_size=256, tied=True, divides=True)
    fields.only("use_bidirectional_attention", (False, None), False)
    if fields.get("attn_logit_softcapping") is not None:
        # transformers has the field but does not use it: there is nothing to be equal to
        fields.refuse("attn_logit_softcapping", fields.get("attn_logit_softcapping"), "supported is null")
    cap = None if fields.get("final_logit_softcapping") is None else fields.number("final_logit_softcapping")
    sizes = shape.sizes | {"M": fields.size("intermediate_size", 9216)}
    every = fields.size("sliding_window_pattern", 6)
    kinds = [SLIDING if (index + 1) % every else FULL for index in range(shape.layers)]
    windows = read_windows(fields, shape.layers, kinds, read_window(fields, 4096))
    ropes = read_ropes(fields, shape)
    common = transformer.Block(
        head_size=sizes["D"],
        norm=norms.rms_from_one(fields.number("rms_norm_eps", 1e-6)),
        mlp=feedforward.gated(read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")),
        scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        weight_dropout=0.0 if fields.is_null("attention_dropout") else fields.rate("attention_dropout"),
    )
    blocks = [replace(common, window=each, rope=ropes[FULL if each is None else SLIDING]) for each in windows]
    scale = math.sqrt(sizes["W"])
    ends = transformer.Ends(common.norm, shape.tied, scale=scale, padding=shape.padding, soft_cap=cap)
    biases = QKV_BIAS | OUTPUT_BIAS if fields.flag("attention_bias") else {}
    rows = ATTENTION | biases | QK_NORM | NORMS | MLP
    return Description(transformer.layers(blocks, ends), (llama_table([rows] * shape.layers, sizes, shape.tied),))


def read_ropes(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Returns the rotary positions of global and local layers: `rope_parameters` for each, or the fields before it."""
    found = {} if fields.get("rope_parameters") is None else fields.get("rope_parameters")
    old = {} if fields.get("rope_scaling") is None else fields.get("rope_scaling")
    for name, given in {"rope_parameters": found, "rope_scaling": old}.items():
        if not isinstance(given, Mapping):
            fields.refuse(name, given, "it must hold rope_type and its parameters, or null")
            found, old = {}, {}
    for unknown in found.keys() - DEFAULTS.keys():
        fields.refuse(f"rope_parameters.{unknown}", found[unknown], f"supported are {FULL!r} and {SLIDING!r}")
    made = {}
    for kind, (outside, theta) in DEFAULTS.items():
        name, given = f"rope_parameters.{kind}", {} if found.get(kind) is None else found[kind]
        if kind == FULL and isinstance(given, Mapping):
            given = {**given, **old}
        if isinstance(given, Mapping) and given.get("truncate", True) is not True:
            # transformers does not read it where there are two sets: there is nothing to be equal to
            fields.refuse(f"{name}.truncate", given["truncate"], "supported is true")
        made[kind] = make_rope(fields, name, given, shape, outside, theta)
    return made


DEFAULTS = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
"""The field, besides `rope_parameters`, that holds a kind of layer's base, and its base without either."""

FAMILY = Family(read, "model.", LLAMA_BUFFERS)
