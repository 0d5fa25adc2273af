"""Llama 2, 3 and their kin (arXiv 2302.13971, 2407.21783); Mistral (arXiv 2310.06825) and Qwen share its reading."""

from __future__ import annotations

from dataclasses import replace

from rpfunc.models import feedforward, norms, transformer
from rpfunc.models.families.family import (
    ATTENTION,
    LLAMA_BUFFERS,
    MLP,
    MLP_BIAS,
    MLP_NORM,
    OUTPUT_BIAS,
    QKV_BIAS,
    Description,
    Family,
    llama_table,
)
from rpfunc.models.families.fields import Fields
from rpfunc.models.families.reading import Shape, read_activation, read_rope, read_shape
from rpfunc.models.families.stored import Row


def read(fields: Fields) -> Description:
    """Returns the model of a config of type `llama`."""
    fields.only("pretraining_tp", (1, None), 1)
    rows = ATTENTION | MLP_NORM | MLP
    if fields.flag("attention_bias"):
        rows = rows | QKV_BIAS | OUTPUT_BIAS
    if fields.flag("mlp_bias"):
        rows = rows | MLP_BIAS
    shape = read_shape(fields, 2048, may_be_null=("num_key_value_heads", "head_dim"), divides=True)
    dropout = 0.0 if fields.is_null("attention_dropout") else fields.rate("attention_dropout")
    return describe(fields, shape, rows, [None] * shape.layers, dropout)


def describe(
    fields: Fields, shape: Shape, rows: dict[str, Row], windows: list[int | None], dropout: float
) -> Description:
    """Returns a model of blocks with these rows and windows, gated MLPs and RMS norms."""
    sizes = shape.sizes | {"M": fields.size("intermediate_size")}
    common = transformer.Block(
        head_size=sizes["D"],
        norm=norms.rms(fields.number("rms_norm_eps", 1e-6)),
        mlp=feedforward.gated(read_activation(fields, "hidden_act")),
        rope=read_rope(fields, shape),
        weight_dropout=dropout,
    )
    blocks = [replace(common, window=window) for window in windows]
    ends = transformer.Ends(common.norm, shape.tied, padding=shape.padding)
    return Description(transformer.layers(blocks, ends), (llama_table([rows] * shape.layers, sizes, shape.tied),))


FAMILY = Family(read, "model.", LLAMA_BUFFERS)
