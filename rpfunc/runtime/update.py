"""One step of the optimizer, in two halves: gradients are measured as they come in; then subtree by subtree is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any, NamedTuple

from torch import Tensor

from rpfunc import tree
from rpfunc.errors import note
from rpfunc.optim import Transformation
from rpfunc.optim.clip import squared_norms
from rpfunc.optim.leafwise import LeafwiseState, exact_sum, measure
from rpfunc.runtime.operations import version_of
from rpfunc.runtime.progress import Happened, Progress
from rpfunc.runtime.session import Running
from rpfunc.runtime.state import Values
from rpfunc.runtime.store import Store
from rpfunc.runtime.trace import Recorder
from rpfunc.runtime.workers import UPDATE


class Measured(NamedTuple):
    """What has to be known of all gradients before any is used.

    gradients  by name, with the structure of the parameters
    norm       the Euclidean norm of them all
    parts      what the optimizer measures, for the whole
    """

    gradients: dict[str, Any]
    norm: float
    parts: Sequence[float]


def measure_gradients(
    optimizer: Transformation, store: Store, running: Running, progress: Progress, recorder: Recorder, number: int
) -> Measured:
    """Takes each subtree's gradient once its last contribution is there, the model's last subtree first.

    Raises Stopped if the iteration fails. The loss scale is taken out again, exactly: it is a power of two.
    """
    gradients: dict[str, Any] = {}
    squares: list[float] = []
    parts: list[float] = []
    leafwise, state = optimizer.leafwise, store.values.optimizer_state
    for name in reversed(store.names):
        waits = [wait.event for wait in running.waits.get(name, ())]
        progress.wait(waits, number)
        with recorder.operation(UPDATE, Happened(number, "gradient", name), waits):
            gradient = running.iteration.gradient(name)
        if running.scale != 1.0:
            for leaf in _tensors(gradient):
                leaf.div_(running.scale)
        gradients[name] = gradient
        squares += squared_norms(gradient)
        if leafwise is not None:
            trained = {name: store.trained(name)}
            parts += measure(
                leafwise, {name: gradient}, LeafwiseState(state.shared, {name: state.leaves[name]}), trained
            )
    return Measured(gradients, sqrt(exact_sum(squares)), parts)


def make_step(store: Store, measured: Measured, progress: Progress, recorder: Recorder, number: int) -> Values:
    """Makes the next version and the optimizer's next copy, and tells of each subtree when it is there.

    An error stops the iterations that would read it.
    """
    try:
        names = store.advance(number, measured.gradients, measured.parts)
        _tell(names, store, store.taken_over(number), progress, recorder, number)
    except BaseException as error:
        note(error, f"in the optimizer's step {number + 1} of this run")
        progress.fail(error, number + 1)
        raise
    return store.values


def skip_step(store: Store, progress: Progress, recorder: Recorder, number: int) -> Values:
    """Makes the next version the same as this one."""
    _tell(store.skip(number), store, None, progress, recorder, number)
    return store.values


def _tell(
    names: Iterator[str],
    store: Store,
    taken_over: int | None,
    progress: Progress,
    recorder: Recorder,
    number: int,
) -> None:
    for name in store.names:
        event = version_of(number + 1, name)
        with recorder.operation(UPDATE, event, ()):
            assert next(names) == name
            recorder.write("main", number + 1, name)
            if taken_over is not None:
                recorder.write("main", taken_over, name)
        progress.record(event)
    next(names, None)  # lets it finish


def _tensors(gradient: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(gradient) if isinstance(leaf, Tensor)]
