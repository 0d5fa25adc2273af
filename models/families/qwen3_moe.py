"""Qwen3-MoE (arXiv 2505.09388): Qwen3 whose MLPs are experts, in all layers or in some."""

from __future__ import annotations

from dataclasses import replace

from rpfunc.models import feedforward, norms, transformer
from rpfunc.models.families.family import LLAMA_BUFFERS, MLP, MLP_NORM, Description, Family, llama_table
from rpfunc.models.families.fields import COUNT, Fields
from rpfunc.models.families.qwen3 import attention
from rpfunc.models.families.reading import Shape, read_activation, read_rope, read_shape, read_window
from rpfunc.models.families.stored import Layout, Row

ROUTER: dict[str, Row] = {"mlp.router": ("mlp.gate.weight", "E W")}


def read(fields: Fields) -> Description:
    """Returns the model of a config of type `qwen3_moe`."""
    shape = read_shape(fields, 32_768, kv_heads=4)
    num, picked = read_experts(fields, shape, 8)
    refuse_router_losses(fields)
    sizes = shape.sizes | {"M": fields.size("intermediate_size", 6144), "E": num}
    sizes["X"] = fields.size("moe_intermediate_size", 768)
    window = read_window(fields, 4096) if fields.flag("use_sliding_window") else None
    fields.get("sliding_window")
    if window is None:
        fields.get("max_window_layers")  # says nothing without windows; with them, transformers does not read it
    expert = feedforward.gated(read_activation(fields, "hidden_act"))
    route = feedforward.softmax_then_pick(picked, fields.flag("norm_topk_prob"))
    dense = transformer.Block(
        head_size=sizes["D"],
        norm=norms.rms(fields.number("rms_norm_eps", 1e-6)),
        mlp=expert,
        rope=read_rope(fields, shape),
        window=window,
        weight_dropout=fields.rate("attention_dropout"),
    )
    sparse = replace(dense, mlp=feedforward.experts(route, expert))
    step, without = fields.size("decoder_sparse_step", 1), fields.get("mlp_only_layers")
    without = [] if without is None else without
    if not isinstance(without, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in without):
        fields.refuse("mlp_only_layers", without, "it must list layers by their numbers")
        without = []
    is_sparse = [(index + 1) % step == 0 and index not in without for index in range(shape.layers)]
    ends = transformer.Ends(dense.norm, shape.tied, padding=shape.padding)
    common = attention(fields) | MLP_NORM
    tables = [
        llama_table([common | (ROUTER | rows if each else MLP) for each in is_sparse], sizes, shape.tied)
        for rows in (apart(num), fused(num))
    ]
    return Description(transformer.layers([sparse if each else dense for each in is_sparse], ends), tuple(tables))


def apart(num: int) -> dict[str, Row]:
    """Returns the rows of experts whose weights are stored one by one."""
    parts = {"gate": "X W", "up": "X W", "down": "W X"}
    return {
        f"mlp.experts.{index}.{part}": (f"mlp.experts.{index}.{part}_proj.weight", shape)
        for index in range(num)
        for part, shape in parts.items()
    }


def fused(num: int) -> dict[str, Row]:
    """Returns the rows of experts stored together, each gate above its up projection, as in transformers' modules."""
    gates = " ".join(f"mlp.experts.{index}.{part}" for index in range(num) for part in ("gate", "up"))
    downs = " ".join(f"mlp.experts.{index}.down" for index in range(num))
    return {
        gates: ("mlp.experts.gate_up_proj", "E 2X W", Layout("e (part x) w", "e part", "x w", {"part": 2})),
        downs: ("mlp.experts.down_proj", "E W X", Layout("e w x", "e", "w x")),
    }


def read_experts(fields: Fields, shape: Shape, picked: int) -> tuple[int, int]:
    """Returns how many experts there are, by either name of the field, and how many a row goes to, or else `picked`."""
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    num = fields.size(name, 128, COUNT)
    if name == "num_experts":
        fields.only("num_local_experts", (num,), num)
    if num * shape.layers > MOST_EXPERTS:
        fields.refuse(name, num, f"in {shape.layers} layers it must be at most {MOST_EXPERTS // shape.layers}")
        num = 1
    picked = fields.size("num_experts_per_tok", picked)
    if picked > num:
        fields.refuse("num_experts_per_tok", picked, f"there are {num} experts")
    return num, picked


MOST_EXPERTS = 2**17
"""In all layers: each is a few entries of a table, which is laid out before any tensor is read."""


def refuse_router_losses(fields: Fields) -> None:
    """Refuses a config that adds the routers' load-balancing loss; its coefficient alone adds nothing."""
    fields.get("router_aux_loss_coef")
    if fields.flag("output_router_logits"):
        fields.refuse("output_router_logits", True, "the router's auxiliary loss is not supported; set it to false")


FAMILY = Family(read, "model.", LLAMA_BUFFERS)
