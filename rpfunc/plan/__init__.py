"""Plans: layers grouped into stages, what they cost, and how to choose the groups."""

from rpfunc.plan.bounds import lower_bound, rule_time
from rpfunc.plan.choose import Choice, choose_streaming
from rpfunc.plan.classic import classic_partition
from rpfunc.plan.costs import LayerCost, StageCost, StageCosts, stage_costs, uniform_costs
from rpfunc.plan.costs_json import load_costs, save_costs
from rpfunc.plan.decoders import DECODERS, DecoderShape, decoder_costs, decoder_shape, unit_costs
from rpfunc.plan.flops import forward_flops
from rpfunc.plan.hardware import COMPUTE_ONLY, Hardware
from rpfunc.plan.held import Ahead, worker_bytes
from rpfunc.plan.joint import joint_costs, joint_slots
from rpfunc.plan.partition import partition, partition_jointly
from rpfunc.plan.plan import Plan, Span
from rpfunc.plan.plan_json import plan_from_json, plan_to_json
from rpfunc.plan.predict import max_sequence, memory
from rpfunc.plan.presets import Machine, adam_update_s, machine
from rpfunc.plan.profile import drift, profile_costs
from rpfunc.plan.roofline import Roofline, decoder_roofline, roofline, roofline_table

__all__ = [
    "COMPUTE_ONLY",
    "DECODERS",
    "Ahead",
    "Choice",
    "DecoderShape",
    "Hardware",
    "LayerCost",
    "Machine",
    "Plan",
    "Roofline",
    "Span",
    "StageCost",
    "StageCosts",
    "adam_update_s",
    "choose_streaming",
    "classic_partition",
    "decoder_costs",
    "decoder_roofline",
    "decoder_shape",
    "drift",
    "forward_flops",
    "joint_costs",
    "joint_slots",
    "load_costs",
    "lower_bound",
    "machine",
    "max_sequence",
    "memory",
    "partition",
    "partition_jointly",
    "plan_from_json",
    "plan_to_json",
    "profile_costs",
    "roofline",
    "roofline_table",
    "rule_time",
    "save_costs",
    "stage_costs",
    "uniform_costs",
    "unit_costs",
    "worker_bytes",
]
