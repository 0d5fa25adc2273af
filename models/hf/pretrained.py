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


def from_config(config: Any, *, ignore: Collection[str] = ()) -> PretrainedModel:
    """Returns the model that a config describes: what config.json holds, or a config object of transformers.

    Its parameters come from a checkpoint, or from elsewhere.
    Raises ModelError listing every field that is missing, unknown or has a value that is not supported; those in
    `ignore` are not looked at. To untie a head: from_config({**model.config, "tie_word_embeddings": False}).
    """
    config = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    return PretrainedModel(describe(config, ignore).layers, dict(config))


def describe(config: Any, ignore: Any = ()) -> Description:
    """Returns the layers that a config means, and how checkpoints store them."""
    if not isinstance(config, Mapping):
        raise ModelError(f"config: is a {type(config).__name__}, needs a dict of fields, or a config of transformers")
    if isinstance(ignore, str) or not isinstance(ignore, Collection):
        raise ModelError(f"ignore: is {ignore!r}, needs a list of config fields")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(f"config: model_type is {kind!r}; supported is one of {sorted(FAMILIES)}")
    fields = Fields(config, ignore)
    description = FAMILIES[kind].read(fields)
    fields.finish(f"config ({kind})")
    return description
