"""A model config's fields, read one by one, so that what is unknown or cannot be done is refused by name."""

from __future__ import annotations

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


LARGEST = 2**24
"""Of a size, unless another bound is given: beyond every model, and sizes multiplied by each other overflow nothing."""

COUNT = 2**12
"""Of layers, heads, numbers in a head, or experts: more cannot be meant, and would take forever to lay out."""


class Fields:
    """The fields of one config; collects what is wrong with them until `finish`.

    No reading raises: what cannot be worked with is noted, and something that can be is returned in its place.
    """

    def __init__(self, config: Mapping[str, Any], ignore: Collection[str] = ()) -> None:
        self._config = config
        self._known = set(INERT) | set(ignore)
        self.problems: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the field as it is, null or not; the default where it is missing."""
        self._known.add(name)
        return self._config.get(name, default)

    def has(self, name: str) -> bool:
        """Returns whether the config has the field, be it null."""
        return name in self._config

    def is_null(self, name: str) -> bool:
        """Returns whether the config has the field as null, which is not the same as leaving it out."""
        return self.has(name) and self.get(name) is None

    def size(self, name: str, default: int | None = None, most: int = LARGEST) -> int:
        """Returns a count of at least 1."""
        found = self.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            self.refuse(name, found, "it must be an integer of at least 1")
            return 1
        if found > most:
            self.refuse(name, found, f"it must be at most {most}")
            return 1
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a positive number, of a magnitude that float32 has."""
        found = self.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 1e-30 <= found <= 1e30:
            self.refuse(name, found, "it must be a positive number, 1e-30 to 1e30")
            return 1.0 if default is None else default
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
        # one by one: what a config holds may have no hash; and True is not 1
        if not any(found == each and isinstance(found, bool) == isinstance(each, bool) for each in supported):
            self.refuse(name, found, f"supported is {' or '.join(repr(each) for each in sorted(supported, key=repr))}")
            return default
        return found

    def refuse(self, name: str, found: Any, needed: str) -> None:
        """Notes that a field's value cannot be worked with."""
        try:
            shown = repr(found)
        except ValueError:  # Python writes no integer of more than 4300 digits
            shown = f"{type(found).__name__} of very many digits"
        self.problems.append(f"{name} is {shown if len(shown) <= 80 else shown[:77] + '...'}; {needed}")

    def has_refused(self, name: str) -> bool:
        """Returns whether the field's value was refused, so that another stands in its place."""
        return any(problem.startswith(f"{name} is ") for problem in self.problems)

    def note_unknown(self) -> None:
        """Refuses every field that nobody has read and that asks for something."""
        for name, found in self._config.items():
            private = isinstance(name, str) and name.startswith("_")
            if name not in self._known and not private and found not in (None, False, [], {}, ""):
                self.refuse(str(name), found, "the field is not known, and may change what the model computes")

    def finish(self, subject: str) -> None:
        """Raises ModelError listing every problem, unknown fields among them."""
        self.note_unknown()
        if self.problems:
            raise ModelError.listing(subject, self.problems)
