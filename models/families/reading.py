"""What the configs of several families have in common: sizes, rotary positions, windows, padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from rpfunc.models import rope
from rpfunc.models.families.fields import Fields
from rpfunc.models.feedforward import ACTIVATIONS
from rpfunc.models.rope import Rope

FULL, SLIDING = "full_attention", "sliding_attention"

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Shape(NamedTuple):
    """Sizes that each family has."""

    layers: int
    sizes: dict[str, int]
    """By letter: V vocabulary, W width, D head size, H heads, Q and K width of all queries and of all keys."""
    tied: bool
    padding: int | None


def read_shape(
    fields: Fields, *, kv_heads: int | None = None, head_size: int | None = None, tied: bool = False
) -> Shape:
    """Returns the sizes; `kv_heads`, `head_size` and `tied` are what the family has where its config says nothing."""
    heads, width, vocabulary = (fields.size(name) for name in ("num_attention_heads", "hidden_size", "vocab_size"))
    keys = fields.size("num_key_value_heads", kv_heads or heads)
    head_size = fields.size("head_dim", head_size or max(width // heads, 1))
    if heads % keys:
        fields.refuse("num_key_value_heads", keys, f"num_attention_heads {heads} must be a multiple of it")
    if head_size % 2:
        fields.refuse("head_dim", head_size, "rotary positions need it even")
    sizes = {"V": vocabulary, "W": width, "D": head_size, "H": heads, "Q": heads * head_size, "K": keys * head_size}
    layers = fields.size("num_hidden_layers")
    return Shape(layers, sizes, fields.flag("tie_word_embeddings", tied), read_padding(fields, vocabulary))


def read_padding(fields: Fields, vocabulary: int) -> int | None:
    """Returns the token whose embedding gets no gradient, counted from the end where it is negative."""
    found = fields.get("pad_token_id")
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or not -vocabulary <= found < vocabulary:
        fields.refuse("pad_token_id", found, f"it must be a token of the vocabulary of {vocabulary}, or null")
        return None
    return found % vocabulary


def read_activation(fields: Fields, name: str, default: str = "silu") -> Callable[[Tensor], Tensor]:
    """Returns the activation that a field names."""
    return ACTIVATIONS[fields.only(name, ACTIVATIONS.keys(), default)]


def read_rope(fields: Fields, size: int, theta: float = 10_000.0, default: Mapping[str, Any] = NOTHING) -> Rope:
    """Returns the rotary positions that `rope_parameters` asks for, or `rope_theta` and `rope_scaling` before them."""
    old = fields.get("rope_scaling")
    found = fields.get("rope_parameters", default) if old is None else old
    name = "rope_parameters" if old is None else "rope_scaling"
    return make_rope(fields, name, found, size, fields.number("rope_theta", theta))


def make_rope(fields: Fields, name: str, found: Any, size: int, theta: float) -> Rope:
    """Returns the rotary positions of one set of parameters; refuses what is not known by name."""
    if not isinstance(found, Mapping):
        fields.refuse(name, found, "it must hold rope_type and its parameters")
        return rope.pretrained(theta, size)
    given = Fields(found)
    theta = given.number("rope_theta", theta)
    kind = given.get("rope_type", given.get("type", "default"))
    given.only("partial_rotary_factor", (1.0,), 1.0)
    made = rope.pretrained(theta, size)
    trained = fields.get("max_position_embeddings", 2048)
    if kind == "linear":
        made = rope.linear(made, given.number("factor"))
    elif kind == "llama3":
        factor, low, high = (given.number(each) for each in ("factor", "low_freq_factor", "high_freq_factor"))
        if high <= low:
            given.refuse("high_freq_factor", high, f"it must be above low_freq_factor {low}")
            high = low + 1.0
        made = rope.llama3(made, factor, low, high, given.size("original_max_position_embeddings", trained))
    elif kind == "yarn":
        made = rope.yarn(
            made,
            theta,
            given.number("factor"),
            given.size("original_max_position_embeddings", trained),
            fast=given.number("beta_fast", 32.0),
            slow=given.number("beta_slow", 1.0),
            truncate=given.flag("truncate", True),
            amplitude=None if given.get("attention_factor") is None else given.number("attention_factor"),
        )
    elif kind != "default":
        fields.refuse(f"{name}.rope_type", kind, "supported is 'default', 'linear', 'llama3' or 'yarn'")
        return made
    given.note_unknown()
    fields.problems.extend(f"{name}.{problem}" for problem in given.problems)
    return made


def read_windows(fields: Fields, layers: int, kinds: list[str], window: int | None) -> list[int | None]:
    """Returns each layer's window, from its `layer_types` or else from `kinds`."""
    found = fields.get("layer_types", kinds)
    if not isinstance(found, list) or len(found) != layers or not set(found) <= {FULL, SLIDING}:
        fields.refuse("layer_types", found, f"it must be {FULL!r} or {SLIDING!r} for each of {layers} layers")
        found = [FULL] * layers
    if SLIDING in found and window is None:
        fields.refuse("layer_types", found, f"{SLIDING!r} needs a sliding_window")
    return [window if kind == SLIDING else None for kind in found]
