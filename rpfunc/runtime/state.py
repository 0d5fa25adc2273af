"""The training state as a handle that can be given up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Self

from rpfunc import tree
from rpfunc.checks import count_problems
from rpfunc.errors import ModelError, OptionsError, StateError
from rpfunc.model import Params
from rpfunc.optim import Transformation
from rpfunc.runtime.state_checks import scale_problems, stale_problems
from rpfunc.runtime.waiting import result_of
from rpfunc.stream.freeze import frozen_leaves


class LossScale(NamedTuple):
    """A dynamic loss scale: the factor, a power of two, and for how many steps no gradient has overflowed.

    Source: Micikevicius et al., 'Mixed precision training' (arXiv 1710.03740), section 3.2.
    """

    factor: float = 2.0**16
    clean: int = 0


class Values(NamedTuple):
    """What a training state holds: with the step's number, all that training needs to go on with the same bits.

    params           p[k], of the dtype in which they are updated
    optimizer_state  s[k]
    stale            c(p[k-1]), what the next iteration computes with if steps are asynchronous: the one before this
                     state's own, cast to the compute dtype; None: c(p[k]), as in a run's first state and in synchronous
                     ones
    scales           where layers compute in float16, the loss scales of the next iterations, one if steps are
                     synchronous, two if not: the next ones to run have theirs before this state's step is known.
                     (): a run's first, 65,536
    """

    params: Params
    optimizer_state: Any
    stale: Params | None = None
    scales: tuple[LossScale, ...] = ()


class State:
    """Parameters, optimizer state and the number of steps taken.

    A donated state has handed its storage to the one that followed it: every later use raises StateError. A state
    whose update is still under way is waited for when it is looked at; if the update fails, that raises its error.

    All that there is to save, for a run that goes on with the same bits, is `values()` and `step`. Without `stale` an
    asynchronous run would take one gradient at other parameters; without `scales` one in float16 would find its loss
    scale anew. The tensors are the run's own, not copies: with donate=True they are to be written, or copied, before
    the next result is asked for. (`rpfunc.train.checkpoint` writes them to one file.)

    >>> from rpfunc import optim, train_steps
    >>> from rpfunc.testing import exact
    >>> optimizer, batches = optim.sgd(0.125, momentum=0.5), [exact.batch(2, 3)] * 4
    >>> how = {"model": exact.model(), "objective": exact.linear(), "optimizer": optimizer, "asynchronous": True}
    >>> state = State.create(exact.init(), optimizer)
    >>> *_, (whole, _) = train_steps(state, batches, **how)
    >>> *_, (half, _) = train_steps(state, batches[:2], **how)
    >>> saved = {**half.values()._asdict(), "step": half.step}  # trees of tensors, and numbers
    >>> *_, (resumed, _) = train_steps(State(**saved), batches[2:], **how)
    >>> all(a.equal(b) for a, b in zip(tree.leaves(resumed.params), tree.leaves(whole.params)))
    True

    Raises OptionsError for a step that is no count, scales that are none, and stale parameters of another model.
    """

    def __init__(
        self,
        params: Params,
        optimizer_state: Any,
        step: int = 0,
        *,
        stale: Params | None = None,
        scales: Sequence[LossScale] = (),
    ) -> None:
        problems = count_problems({"step": step}, least=0) + scale_problems(scales)
        if stale is not None:
            problems += stale_problems(stale, params)
        if problems:
            raise OptionsError.listing("state", problems)
        self._future: Future[Values] = Future()
        self._future.set_result(Values(params, optimizer_state, stale, tuple(LossScale(*scale) for scale in scales)))
        self._step = step
        self._consumed = ""

    @classmethod
    def create(cls, params: Params, optimizer: Transformation, frozen: tree.Mask | None = None) -> Self:
        """Returns the state before the first step; leaves that `frozen` selects have no optimizer state."""
        if not isinstance(params, Mapping):
            raise ModelError(f"state: params is a {type(params).__name__}, needs a dict of subtrees by name")
        if not isinstance(optimizer, Transformation):
            raise OptionsError(f"state: optimizer is a {type(optimizer).__name__}, needs one of rpfunc.optim")
        chosen = tree.unflatten(tree.flatten(dict(params))[1], frozen_leaves(params, frozen))
        return cls(params, optimizer.init(tree.partition(dict(params), chosen)[1]))

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

    def take_back(self) -> None:
        """Makes the state good again: what it was given up for has not begun."""
        self._consumed = ""

    def break_with(self, cause: str) -> None:
        """Marks the state as lost: an update overwrote a part of it and did not finish."""
        self._consumed = f"is broken: {cause} had begun to overwrite it"
