"""What the configs of several families have in common: sizes, rotary positions, windows, padding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from rpfunc.models import rope
from rpfunc.models.families.fields import COUNT, Fields
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
    rows: int
    """That the weights were trained for, where their rotary positions do not say it."""


def read_shape(
    fields: Fields,
    rows: int,
    *,
    kv_heads: int | None = None,
    head_size: int | None = None,
    tied: bool = False,
    may_be_null: Collection[str] = (),
    divides: bool = False,
) -> Shape:
    """Returns the sizes.

    rows                       `max_position_embeddings` where the config says nothing
    kv_heads, head_size, tied  likewise for the family's others; None: heads, width / heads
    may_be_null                which of `num_key_value_heads` and `head_dim` may be null, for heads and width / heads
    divides                    whether the width must be a multiple of heads, since transformers takes no other
    """
    heads, width = fields.size("num_attention_heads", most=COUNT), fields.size("hidden_size")
    vocabulary, layers = fields.size("vocab_size"), fields.size("num_hidden_layers", most=COUNT)
    null = {name for name in may_be_null if fields.is_null(name)}
    keys = heads if "num_key_value_heads" in null else fields.size("num_key_value_heads", kv_heads or heads, COUNT)
    derived = max(width // heads, 1)
    head_size = derived if "head_dim" in null else fields.size("head_dim", head_size or derived, COUNT)
    if divides and width % heads:
        fields.refuse(
            "num_attention_heads",
            heads,
            f"hidden_size {width} must be a multiple of it, as transformers asks; head_dim sets a head's size apart",
        )
    if heads % keys:
        fields.refuse("num_key_value_heads", keys, f"num_attention_heads {heads} must be a multiple of it")
    if head_size % 2 and not fields.has_refused("head_dim"):
        fields.refuse("head_dim", head_size, "rotary positions need it even")
    sizes = {"V": vocabulary, "W": width, "D": head_size, "H": heads, "Q": heads * head_size, "K": keys * head_size}
    tied, rows = fields.flag("tie_word_embeddings", tied), fields.size("max_position_embeddings", rows, MOST_ROWS)
    return Shape(layers, sizes, tied, read_padding(fields, vocabulary), rows)


MOST_ROWS = 2**31


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


def read_rope(fields: Fields, shape: Shape, theta: float = 10_000.0, default: Mapping[str, Any] = NOTHING) -> Rope:
    """Returns the rotary positions that `rope_parameters` asks for, or `rope_theta` and `rope_scaling` before them."""
    new = default if fields.get("rope_parameters") is None else fields.get("rope_parameters")
    old = fields.get("rope_scaling")
    if old is None or old == {}:  # as if it were not there
        return make_rope(fields, "rope_parameters", new, shape, "rope_theta", theta)
    return make_rope(fields, "rope_scaling", old, shape, "rope_theta", theta)


def make_rope(fields: Fields, name: str, found: Any, shape: Shape, outside: str, theta: float) -> Rope:
    """Returns the rotary positions of one set of parameters; refuses what is not known by name.

    Their base is in the set, or else in the config's field `outside`, or else `theta`.
    """
    size = shape.sizes["D"]
    if not isinstance(found, Mapping):
        fields.refuse(name, found, "it must hold rope_type and its parameters")
        return rope.pretrained(theta, size)
    given = Fields(found)
    if given.has("rope_theta"):
        fields.get(outside)
        theta = given.number("rope_theta", theta)
    else:
        theta = fields.number(outside, theta)
    kind = given.get("rope_type", given.get("type", "default"))
    given.only("partial_rotary_factor", (1.0,), 1.0)
    made = rope.pretrained(theta, size)
    if kind == "linear":
        made = rope.linear(made, given.number("factor"))
    elif kind == "llama3":
        factor, low, high = (given.number(each) for each in ("factor", "low_freq_factor", "high_freq_factor"))
        if high <= low:
            given.refuse("high_freq_factor", high, f"it must be above low_freq_factor {low}")
            high = low + 1.0
        made = rope.llama3(
            made, factor, low, high, given.size("original_max_position_embeddings", shape.rows, MOST_ROWS)
        )
    elif kind == "yarn" and theta <= 1.0:
        fields.refuse(f"{name}.rope_theta", theta, "it must be above 1 for yarn")
    elif kind == "yarn":
        made = rope.yarn(
            made,
            theta,
            given.number("factor"),
            given.size("original_max_position_embeddings", shape.rows, MOST_ROWS),
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


def read_window(fields: Fields, default: int) -> int | None:
    """Returns `sliding_window`, where null means none and nothing means the default."""
    return None if fields.is_null("sliding_window") else fields.size("sliding_window", default, MOST_ROWS)


def read_windows(fields: Fields, layers: int, kinds: list[str], window: int | None) -> list[int | None]:
    """Returns each layer's window, from its `layer_types` or else from `kinds`."""
    found = kinds if fields.get("layer_types") is None else fields.get("layer_types")
    if not isinstance(found, list) or len(found) != layers or not all(each in (FULL, SLIDING) for each in found):
        fields.refuse("layer_types", found, f"it must be {FULL!r} or {SLIDING!r} for each of {layers} layers")
        found = [FULL] * layers
    if SLIDING in found and window is None:
        fields.refuse("layer_types", found, f"{SLIDING!r} needs a sliding_window")
    return [window if kind == SLIDING else None for kind in found]
