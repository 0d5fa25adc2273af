"""Calls of a layer's functions: what they raise names the layer, and what they may not write to has stayed as it was.

Source: own.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal

from torch import Tensor

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.errors import ModelError, note
from rpfunc.model import Layer
from rpfunc.stream.freeze import Frozen
from rpfunc.stream.writes import ADVICE, Counters


class Calling:
    """A context in which functions of one layer run; every way of running a model calls them in one.

    doing  the pass that it is for
    given  what the layer gets: its parameters, x, batch; nothing, where it has been looked after already

    An error passes through as it is, with a note that names layer and pass; what is no Exception, such as
    KeyboardInterrupt, without one. Where a function ends well but has written in place to a tensor of `given`, raises
    ModelError that names the layer and the leaf.

    Nothing is said of a parameter that is a part of a larger tensor, whose parts share one counter (see `Counters`): an
    optimizer may be updating the one beside it.
    """

    # a class, since a generator would have to tell the StopIteration that a layer raises from its own
    def __init__(self, layer: Layer, doing: Literal["forward", "backward"], *given: Any) -> None:
        self._layer, self._doing, self._given = layer, doing, given

    def __enter__(self) -> None:
        self._counters = Counters(_leaves(*self._given) if self._given else ())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            note(error, f"in layer {self._layer.name!r}, {self._doing} pass")
        elif error is None and (changed := self._counters.changed()):
            self._refuse_writes(changed)

    def _refuse_writes(self, changed: set[int]) -> None:
        found = [
            name
            for name, leaf in _named(self._layer, *self._given)
            if id(_thawed(leaf)) in changed and not (name.startswith("parameter ") and _is_part(_thawed(leaf)))
        ]
        if found:
            raise ModelError(f"layer {self._layer.name!r}: has written in place to {', '.join(found)}, {ADVICE}")


def _leaves(params: Any, x: Any, batch: Batch) -> Any:
    return params, x, batch.row, batch.example, batch.group, batch.constant


def _named(layer: Layer, params: Any, x: Any, batch: Batch) -> list[tuple[str, Any]]:
    """Returns every leaf and what to call it."""
    subtrees = tree.flatten(layer.reads)[1].flatten_up_to(params)
    parts = [(f"parameter {name}", subtree) for name, subtree in zip(layer.subtrees, subtrees, strict=True)]
    parts += [("x", x)]
    parts += [(f"batch.{part}", getattr(batch, part)) for part in ("row", "example", "group", "constant")]
    return [
        (f"{part}.{path}" if path else part, leaf)
        for part, structured in parts
        for path, leaf in zip(tree.paths(structured), tree.leaves(structured), strict=True)
    ]


def _thawed(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, Frozen) else leaf


def _is_part(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
