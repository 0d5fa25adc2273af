"""The training state as a handle that can be given up."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple, Self

from rpfunc import tree
from rpfunc.errors import StateError
from rpfunc.model import Params
from rpfunc.optim import Transformation
from rpfunc.runtime.waiting import result_of


class LossScale(NamedTuple):
    """A dynamic loss scale: the factor, a power of two, and for how many steps no gradient has overflowed.

    Source: Micikevicius et al., 'Mixed precision training' (arXiv 1710.03740), section 3.2.
    """

    factor: float = 2.0**16
    clean: int = 0


class Values(NamedTuple):
    """What a training state holds.

    params           p[k], of the dtype in which they are updated
    optimizer_state  s[k]
    stale            c(p[k-1]), what iteration k computes with if the optimizer is one step behind; None: p[k]
    scales           loss scales of the next iterations that have one already
    """

    params: Params
    optimizer_state: Any
    stale: Params | None = None
    scales: tuple[LossScale, ...] = ()


class State:
    """Parameters, optimizer state and the number of steps taken.

    A donated state has handed its storage to the one that followed it: every later use raises StateError. A state
    whose update is still under way is waited for when it is looked at; if the update fails, that raises its error.
    """

    def __init__(
        self,
        params: Params,
        optimizer_state: Any,
        step: int = 0,
        *,
        stale: Params | None = None,
        scales: tuple[LossScale, ...] = (),
    ) -> None:
        self._future: Future[Values] = Future()
        self._future.set_result(Values(params, optimizer_state, stale, scales))
        self._step = step
        self._consumed = ""

    @classmethod
    def create(cls, params: Params, optimizer: Transformation, frozen: tree.Mask | None = None) -> Self:
        """Returns the state before the first step; leaves that `frozen` selects have no optimizer state."""
        _, trained = tree.partition(dict(params), False if frozen is None else frozen)
        return cls(params, optimizer.init(trained))

    @classmethod
    def pending(cls, values: Future[Values], step: int) -> Self:
        """Returns the state of an update that may be under way still."""
        state = cls({}, (), step)
        state._future = values
        return state

    @property
    def params(self) -> Params:
        """The parameters. Raises StateError if the state was donated."""
        return self.values().params

    @property
    def optimizer_state(self) -> Any:
        """The optimizer's state. Raises StateError if the state was donated."""
        return self.values().optimizer_state

    @property
    def step(self) -> int:
        """How many steps have been taken, skipped ones included."""
        return self._step

    def values(self) -> Values:
        """Returns all that the state holds. Raises StateError if it was donated."""
        if self._consumed:
            raise StateError(
                f"state of step {self._step}: {self._consumed}; use the state that followed it, "
                "or load the last checkpoint, or train with donate=False"
            )
        return result_of(self._future)

    def consume(self) -> Values:
        """Returns all that the state holds and gives the state up."""
        values = self.values()
        self._consumed = f"was donated to step {self._step + 1}"
        return values

    def break_with(self, cause: str) -> None:
        """Marks the state as lost: an update overwrote a part of it and did not finish."""
        self._consumed = f"is broken: {cause} had begun to overwrite it"
