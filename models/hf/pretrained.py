"""A model together with the config that it came from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rpfunc.errors import ModelError
from rpfunc.model import Model
from rpfunc.models.families import FAMILIES, Description, Fields


@dataclass(frozen=True)
class PretrainedModel(Model):
    """A model that can be written as a checkpoint: `config` is what config.json says."""

    config: Mapping[str, Any] = field(default_factory=dict, hash=False)


def from_config(config: Mapping[str, Any], *, ignore: Collection[str] = ()) -> PretrainedModel:
    """Returns the model that a config describes; its parameters come from a checkpoint, or from elsewhere.

    Raises ModelError listing every field that is missing, unknown or has a value that is not supported; those in
    `ignore` are not looked at. To untie a head: from_config({**model.config, "tie_word_embeddings": False}).
    """
    return PretrainedModel(describe(config, ignore).layers, dict(config))


def describe(config: Mapping[str, Any], ignore: Collection[str] = ()) -> Description:
    """Returns the layers that a config means, and how checkpoints store them."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(f"config: model_type is {kind!r}; supported is one of {sorted(FAMILIES)}")
    fields = Fields(config, ignore)
    try:
        description = FAMILIES[kind].read(fields)
    except (ModelError, ArithmeticError):
        if not fields.problems:
            raise
    fields.finish(f"config ({kind})")
    return description
