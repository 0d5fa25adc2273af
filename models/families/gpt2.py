"""GPT-2 (Radford et al. 2019): learned positions, layer norms, plain MLPs, weights stored as (in, out)."""

from __future__ import annotations

from dataclasses import replace

from rpfunc.models import feedforward, norms, transformer
from rpfunc.models.families.family import Description, Family
from rpfunc.models.families.fields import COUNT, Fields
from rpfunc.models.families.reading import read_activation
from rpfunc.models.families.stored import Layout, Row, table

TRANSPOSED = Layout("inputs out", "", "out inputs")

ENDS: dict[str, Row] = {
    "embedding": ("transformer.wte.weight", "V W"),
    "positions": ("transformer.wpe.weight", "P W"),
    "norm.scale": ("transformer.ln_f.weight", "W"),
    "norm.bias": ("transformer.ln_f.bias", "W"),
}
BLOCK: dict[str, Row] = {
    "attention.norm.scale": ("ln_1.weight", "W"),
    "attention.norm.bias": ("ln_1.bias", "W"),
    "attention.query attention.key attention.value": (
        "attn.c_attn.weight",
        "W 3W",
        Layout("inputs (part out)", "part", "out inputs", {"part": 3}),
    ),
    "attention.query_bias attention.key_bias attention.value_bias": (
        "attn.c_attn.bias",
        "3W",
        Layout("(part out)", "part", "out", {"part": 3}),
    ),
    "attention.output": ("attn.c_proj.weight", "W W", TRANSPOSED),
    "attention.output_bias": ("attn.c_proj.bias", "W"),
    "mlp.norm.scale": ("ln_2.weight", "W"),
    "mlp.norm.bias": ("ln_2.bias", "W"),
    "mlp.up": ("mlp.c_fc.weight", "W M", TRANSPOSED),
    "mlp.up_bias": ("mlp.c_fc.bias", "M"),
    "mlp.down": ("mlp.c_proj.weight", "M W", TRANSPOSED),
    "mlp.down_bias": ("mlp.c_proj.bias", "W"),
}


def read(fields: Fields) -> Description:
    """Returns the model of a config of type `gpt2`."""
    width = fields.size("n_embd")
    heads, num = (fields.size(name, most=COUNT) for name in ("n_head", "n_layer"))
    if width % heads:
        fields.refuse("n_head", heads, f"n_embd {width} must be a multiple of it")
    for name in ("reorder_and_upcast_attn", "add_cross_attention"):
        fields.only(name, (False,), False)
    for name in SUMMARY:
        fields.get(name)
    fields.get("pad_token_id")
    sizes = {"V": fields.size("vocab_size"), "W": width, "P": fields.size("n_positions", 1024)}
    fields.only("max_position_embeddings", (sizes["P"],), sizes["P"])  # n_positions by another name
    sizes["M"] = 4 * width if fields.get("n_inner") is None else fields.size("n_inner")
    tied = fields.flag("tie_word_embeddings", True)
    size = max(width // heads, 1)
    scale = size**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    common = transformer.Block(
        head_size=size,
        norm=norms.layer(fields.number("layer_norm_epsilon", 1e-5)),
        mlp=feedforward.plain(read_activation(fields, "activation_function", "gelu_new")),
        dropout=fields.rate("resid_pdrop", 0.1),
        weight_dropout=fields.rate("attn_pdrop", 0.1),
    )
    shrinking = fields.flag("scale_attn_by_inverse_layer_idx")
    blocks = [replace(common, scale=scale / (index + 1 if shrinking else 1)) for index in range(num)]
    ends = transformer.Ends(common.norm, tied, positions=True, dropout=fields.rate("embd_pdrop", 0.1))
    stored = table(ENDS if tied else {**ENDS, "head": ("lm_head.weight", "V W")}, sizes)
    for index in range(num):
        stored += table(BLOCK, sizes, path=(f"block{index}",), prefix=f"transformer.h.{index}.")
    return Description(transformer.layers(blocks, ends), (stored,))


SUMMARY = (
    "n_ctx",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
)
"""Fields of other models with GPT-2's body."""

FAMILY = Family(read, "transformer.", r".*\.attn\.(masked_)?bias")
