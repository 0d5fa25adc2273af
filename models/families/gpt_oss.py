"""GPT-OSS (arXiv 2508.10925): sinks, windows in every second layer, experts with biases and a clamped activation."""

from __future__ import annotations

from dataclasses import replace

from rpfunc.models import feedforward, norms, transformer
from rpfunc.models.families.family import (
    ATTENTION,
    LLAMA_BUFFERS,
    MLP_NORM,
    OUTPUT_BIAS,
    QKV_BIAS,
    Description,
    Family,
    llama_table,
)
from rpfunc.models.families.fields import Fields
from rpfunc.models.families.qwen3_moe import read_experts, refuse_router_losses
from rpfunc.models.families.reading import FULL, SLIDING, read_rope, read_shape, read_window, read_windows
from rpfunc.models.families.stored import Layout, Row

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What a config without rotary parameters means."""


def read(fields: Fields) -> Description:
    """Returns the model of a config of type `gpt_oss`."""
    shape = read_shape(fields, 131_072, kv_heads=8, head_size=64)
    num, picked = read_experts(fields, shape, 4)
    fields.only("experts_per_token", (picked, None), picked)
    fields.get("initial_context_length")  # of rope_scaling, by another name
    refuse_router_losses(fields)
    fields.only("hidden_act", ("silu",), "silu")
    sizes = shape.sizes | {"E": num, "X": fields.size("intermediate_size")}
    window = read_window(fields, 128)
    kinds = [FULL if index % 2 else SLIDING for index in range(shape.layers)]
    expert = feedforward.clamped(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    common = transformer.Block(
        head_size=sizes["D"],
        norm=norms.rms(fields.number("rms_norm_eps", 1e-5)),
        mlp=feedforward.experts(feedforward.pick_then_softmax(picked), expert),
        rope=read_rope(fields, shape, 150_000.0, YARN),
        weight_dropout=fields.rate("attention_dropout"),
    )
    blocks = [replace(common, window=each) for each in read_windows(fields, shape.layers, kinds, window)]
    ends = transformer.Ends(common.norm, shape.tied, padding=shape.padding)
    biases = QKV_BIAS | OUTPUT_BIAS if fields.flag("attention_bias", True) else {}
    rows = ATTENTION | biases | SINKS | MLP_NORM | ROUTER | experts(num)
    return Description(transformer.layers(blocks, ends), (llama_table([rows] * shape.layers, sizes, shape.tied),))


SINKS: dict[str, Row] = {"attention.sinks": ("self_attn.sinks", "H")}
ROUTER: dict[str, Row] = {
    "mlp.router": ("mlp.router.weight", "E W"),
    "mlp.router_bias": ("mlp.router.bias", "E"),
}


def experts(num: int) -> dict[str, Row]:
    """Returns the rows of experts stored together as (in, out), gate and up projection in turn."""

    def paths(*parts: str) -> str:
        return " ".join(f"mlp.experts.{index}.{part}" for index in range(num) for part in parts)

    return {
        paths("gate", "up"): (
            "mlp.experts.gate_up_proj",
            "E W 2X",
            Layout("e w (x part)", "e part", "x w", {"part": 2}),
        ),
        paths("gate_bias", "up_bias"): (
            "mlp.experts.gate_up_proj_bias",
            "E 2X",
            Layout("e (x part)", "e part", "x", {"part": 2}),
        ),
        paths("down"): ("mlp.experts.down_proj", "E X W", Layout("e x w", "e", "w x")),
        paths("down_bias"): ("mlp.experts.down_proj_bias", "E W", Layout("e w", "e", "w")),
    }


FAMILY = Family(read, "model.", LLAMA_BUFFERS)
