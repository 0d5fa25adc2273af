"""Recurrent layers: an output row depends on its own input row and a state that the rows before it have left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rpfunc.batch import Batch
from rpfunc.errors import ModelError
from rpfunc.stream.form import Scanning
from rpfunc.stream.writes import reading

Body = Callable[[Any, Any, Any, Batch], tuple[Any, Any]]
Init = Callable[[Any, Batch], Any]


def recurrent(body: Body, init: Init) -> Recurrent:
    """Returns the form of `body(params, x, state, batch) -> (y, state)`, run from `init(params, batch) -> state`.

    `body` maps any run of rows and the state before them to their outputs and the state after them; cutting a run in
    two must change nothing. States are kept at chunk borders only, so a chunk costs memory for its rows and one state.
    `init` reads the batch's number of examples, never its rows.
    """
    return Recurrent(body, init)


@dataclass(frozen=True)
class Recurrent(Scanning):
    """See `recurrent`. A run of rows leaves the state after it."""

    body: Body
    init: Init

    def full(self, params: Any, x: Any, batch: Batch) -> Any:
        """Returns the output for whole rows."""
        return self.step(params, x, None, batch)[0]

    def step(self, params: Any, x: Any, past: Any, batch: Batch) -> tuple[Any, Any]:
        """Returns (output rows, the state after them)."""
        state = self.init(params, batch) if past is None else past
        found: Any = reading("state", state, self.body, params, x, state, batch)
        if not isinstance(found, tuple | list) or len(found) != 2:  # a tensor would be taken apart by its examples
            what = f"{len(found)} values" if isinstance(found, tuple | list) else f"a {type(found).__name__}"
            raise ModelError(f"recurrent: `body` returned {what}, needs two: (output rows, the state after them)")
        output, after = found
        return output, after

    def leave(self, params: Any, x: Any, past: Any, batch: Batch) -> Any:
        """Returns the state after the rows."""
        return self.step(params, x, past, batch)[1]

    def precompose(self, function: Callable[[Any], Any]) -> Recurrent:
        """Returns the form that applies `function` to its parameters first."""
        return Recurrent(
            lambda params, x, state, batch: self.body(function(params), x, state, batch),
            lambda params, batch: self.init(function(params), batch),
        )
