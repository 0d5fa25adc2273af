"""A model config's fields, read one by one, so that what is unknown or cannot be done is refused by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from rpfunc.errors import ModelError

INERT = frozenset(
    [
        "architectures",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "max_position_embeddings",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "use_cache",
    ]
)
"""Fields that change no logit and no gradient."""


class Fields:
    """The fields of one config; collects what is wrong with them until `finish`."""

    def __init__(self, config: Mapping[str, Any], ignore: Collection[str] = ()) -> None:
        self._config = config
        self._known = set(INERT) | set(ignore)
        self.problems: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the field, or the default where it is missing or null."""
        self._known.add(name)
        found = self._config.get(name)
        return default if found is None else found

    def has(self, name: str) -> bool:
        """Returns whether the config has the field, be it null."""
        return name in self._config

    def size(self, name: str, default: int | None = None) -> int:
        """Returns a count of at least 1."""
        found = self.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            self.refuse(name, found, "it must be an integer of at least 1")
            return 1
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a positive, finite number."""
        found = self.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0.0 < found < math.inf:
            self.refuse(name, found, "it must be a positive number")
            return 1.0
        return float(found)

    def rate(self, name: str, default: float = 0.0) -> float:
        """Returns a dropout rate."""
        found = self.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0.0 <= found < 1.0:
            self.refuse(name, found, "it must be at least 0 and below 1")
            return 0.0
        return float(found)

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a truth value."""
        found = self.get(name, default)
        if not isinstance(found, bool):
            self.refuse(name, found, "it must be true or false")
            return default
        return found

    def only(self, name: str, supported: Collection[Any], default: Any) -> Any:
        """Returns the field, which must be one of `supported`."""
        found = self.get(name, default)
        if found not in supported:
            self.refuse(name, found, f"supported is {' or '.join(repr(each) for each in sorted(supported, key=repr))}")
            return default
        return found

    def refuse(self, name: str, found: Any, needed: str) -> None:
        """Notes that a field's value cannot be worked with."""
        shown = repr(found)
        self.problems.append(f"{name} is {shown if len(shown) <= 80 else shown[:77] + '...'}; {needed}")

    def note_unknown(self) -> None:
        """Refuses every field that nobody has read and that asks for something."""
        for name, found in self._config.items():
            if name not in self._known and not name.startswith("_") and found not in (None, False, [], {}, ""):
                self.refuse(name, found, "the field is not known, and may change what the model computes")

    def finish(self, subject: str) -> None:
        """Raises ModelError listing every problem, unknown fields among them."""
        self.note_unknown()
        if self.problems:
            raise ModelError.listing(subject, self.problems)
