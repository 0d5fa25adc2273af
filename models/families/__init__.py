"""Families of pretrained models: what their configs mean and how their checkpoints store parameters."""

from types import MappingProxyType

from rpfunc.models.families import gemma3, gpt2, gpt_oss, llama, mistral, qwen2, qwen3, qwen3_moe
from rpfunc.models.families.family import Description, Family
from rpfunc.models.families.fields import Fields
from rpfunc.models.families.stored import Stored, Table, build

FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "gemma3_text": gemma3.FAMILY,
        "gpt2": gpt2.FAMILY,
        "gpt_oss": gpt_oss.FAMILY,
        "llama": llama.FAMILY,
        "mistral": mistral.FAMILY,
        "qwen2": qwen2.FAMILY,
        "qwen3": qwen3.FAMILY,
        "qwen3_moe": qwen3_moe.FAMILY,
    }
)
"""By `model_type`."""

__all__ = ["FAMILIES", "Description", "Family", "Fields", "Stored", "Table", "build"]
