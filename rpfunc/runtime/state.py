"""The training state as a handle that can be given up."""

from __future__ import annotations

from typing import Any, Self

from rpfunc import tree
from rpfunc.errors import StateError
from rpfunc.model import Params
from rpfunc.optim import Transformation


class State:
    """Parameters, optimizer state and the number of steps taken.

    A donated state has handed its storage to the one that followed it: every later use raises StateError.
    """

    def __init__(self, params: Params, optimizer_state: Any, step: int = 0) -> None:
        self._params, self._optimizer_state, self._step = params, optimizer_state, step
        self._consumed = ""

    @classmethod
    def create(cls, params: Params, optimizer: Transformation, frozen: tree.Mask | None = None) -> Self:
        """Returns the state before the first step; leaves that `frozen` selects have no optimizer state."""
        _, trained = tree.partition(dict(params), False if frozen is None else frozen)
        return cls(params, optimizer.init(trained))

    @property
    def params(self) -> Params:
        """The parameters. Raises StateError if the state was donated."""
        self._check()
        return self._params

    @property
    def optimizer_state(self) -> Any:
        """The optimizer's state. Raises StateError if the state was donated."""
        self._check()
        return self._optimizer_state

    @property
    def step(self) -> int:
        """How many steps have been taken, skipped ones included."""
        return self._step

    def consume(self) -> tuple[Params, Any]:
        """Returns (params, optimizer_state) and gives the state up."""
        self._check()
        self._consumed = f"was donated to step {self._step + 1}"
        return self._params, self._optimizer_state

    def break_with(self, cause: str) -> None:
        """Marks the state as lost: an update overwrote a part of it and did not finish."""
        self._consumed = f"is broken: {cause} had begun to overwrite it"

    def _check(self) -> None:
        if self._consumed:
            raise StateError(
                f"state of step {self._step}: {self._consumed}; use the state that followed it, "
                "or load the last checkpoint, or train with donate=False"
            )
