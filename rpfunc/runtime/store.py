"""The host's copies of the parameters over the steps of a training run, and how a step makes the next ones.

Iteration k computes the gradient at c(p[k - staleness]), where c casts to the compute dtype, and step k makes
p[k + 1] = p[k] + u(gradient; s[k], p[k]). Two kinds of copies follow from that: the *optimizer's* p[k], and the *main*
copies c(p), by version, which workers read. Without a cast a main copy is the optimizer's own. With donation a step
writes over what nobody will read again: the optimizer's copy where main copies are apart, and of main copies the one
that iteration k has read, since step k comes after all of its gradients.

Source: RoundPipe (arXiv 2604.27085) for copies and staleness; versions that take over each other's memory: own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rpfunc import tree
from rpfunc.errors import OptimizerError
from rpfunc.model import Model, Params
from rpfunc.optim import Transformation, step, step_donated
from rpfunc.optim.base import check_leafwise_state
from rpfunc.optim.donatable import check_donatable
from rpfunc.optim.leafwise import LeafwiseState, prepare
from rpfunc.optim.rows import rows
from rpfunc.optim.step import advance_donated
from rpfunc.runtime.state import Values
from rpfunc.stream.flat import dense
from rpfunc.stream.freeze import Frozen, frozen_leaves, mark


class Store:
    """The copies of one training run; `advance` is called by one thread at a time, step after step.

    versions  by number, the main copies: by name, subtrees whose frozen leaves are marked. Version k + 1 fills while
              step k goes on
    """

    def __init__(
        self,
        model: Model,
        values: Values,
        optimizer: Transformation,
        *,
        frozen: tree.Mask | None,
        staleness: int,
        compute_dtype: torch.dtype | None,
        donate: bool,
    ) -> None:
        params = dict(tree.map(dense, dict(values.params)))
        self._frozen = tree.unflatten(tree.flatten(params)[1], frozen_leaves(params, frozen))
        self._optimizer, self._staleness, self._donate = optimizer, staleness, donate
        self._compute_dtype = compute_dtype
        self.names = list(dict.fromkeys(name for layer in model.layers for name in layer.subtrees))
        self.values = Values(params, values.optimizer_state)
        if optimizer.leafwise is not None:
            check_leafwise_state(values.optimizer_state)
            trained = tree.partition(params, self._frozen)[1]
            found = rows(trained, values.optimizer_state.leaves, trained)
            missing = [f"{row.path} has none; State.create needs the same frozen" for row in found if row.state is None]
            if missing:
                raise OptimizerError.listing("optimizer state does not fit the parameters", missing)
        main = {name: self._cast(name, params[name], None) for name in self.names}
        self.versions: dict[int, dict[str, Any]] = {0: main}
        if staleness:
            self.versions[-1] = main if values.stale is None else self._given(dict(values.stale), main)

    def open(self, version: int) -> None:
        """Makes place for a version that a step is about to make."""
        self.versions[version] = {}

    def trained(self, name: str) -> Any:
        """Returns the optimizer's copy of a subtree, None in the place of frozen leaves."""
        return tree.partition(self.values.params[name], self._frozen[name])[1]

    def read_by(self, iteration: int) -> int:
        """Returns the version that an iteration reads."""
        return iteration - self._staleness

    def advance(self, number: int, gradients: dict[str, Any], parts: Sequence[float]) -> Iterator[str]:
        """Makes version number + 1 and the optimizer's next copy; yields each subtree's name once it is there.

        gradients  by name; each is let go of when it has been used, as is the version that nobody reads any more
        parts      what the optimizer has measured of them
        """
        params, state = self.values[:2]
        leafwise = self._optimizer.leafwise
        free = self._free(number)
        fixed, trained = tree.partition(params, self._frozen)
        targets = {name: self._target(trained[name], free.get(name)) for name in self.names}
        if leafwise is None:
            advance = step_donated if self._donate else step
            targets, state = advance(self._optimizer, gradients, state, targets)
        else:
            leaves = state.leaves if self._donate else tree.map(torch.clone, state.leaves)
            if self._donate:
                check_donatable(gradients, (state.shared, leaves), targets)
            coefficients, shared = prepare(leafwise, parts, state.shared)
            state = LeafwiseState(shared, leaves)
        made: dict[str, Any] = {}
        version = self.versions[number + 1]
        for name in self.names:
            gradient = gradients.pop(name)
            if leafwise is not None:
                advance_donated(leafwise, {name: gradient}, {name: leaves[name]}, {name: targets[name]}, coefficients)
            made[name] = tree.combine(fixed[name], targets[name])
            version[name] = self._cast(name, made[name], free.get(name))
            yield name
        self._close(number, made, state)

    def skip_version(self, number: int) -> None:
        """Makes version number + 1 the same as version `number`."""
        self.versions[number + 1] = self.versions[number]

    def skip(self, number: int) -> Iterator[str]:
        """As `advance`, for a step that changes nothing; after `skip_version`."""
        yield from self.names
        self._close(number, *self.values[:2])

    def _close(self, number: int, params: Params, state: Any) -> None:
        """Keeps what the step has made; the version that iteration `number` read is let go of."""
        del self.versions[self.read_by(number)]
        self.values = Values(params, state, _unmarked(self.versions[number]) if self._staleness else None)

    def taken_over(self, number: int) -> int | None:
        """Returns the version whose memory step `number` writes over, if it does."""
        return self.read_by(number) if self._free(number) else None

    def _free(self, number: int) -> dict[str, Any]:
        """Returns the main copies that may be written over: those that iteration `number` has read."""
        read = self.versions[self.read_by(number)]
        newest = self.versions[number]
        return read if self._donate and (read is not newest or not self._staleness) else {}

    def _target(self, trained: Any, free: Any) -> Any:
        """Returns the optimizer's copy of a subtree in memory that the step may write over.

        Where the newest copies are main copies too, the next iteration reads them; then the free ones take their place.
        """
        leaves, structure = tree.flatten(trained)
        places = (
            [None] * len(leaves) if free is None else [leaf for leaf in tree.leaves(free) if isinstance(leaf, Tensor)]
        )

        def target(leaf: Tensor, place: Tensor | None) -> Tensor:
            if not self._donate or (self._staleness and self._is_main(leaf) and place is None):
                return leaf.clone()
            return place.copy_(leaf) if self._staleness and self._is_main(leaf) and place is not None else leaf

        return tree.unflatten(structure, list(map(target, leaves, places)))

    def _cast(self, name: str, params: Any, free: Any) -> Any:
        """Returns the main copy of a subtree, written over `free`, an earlier one, if there is one."""
        marked = mark(params, self._frozen[name])
        leaves, structure = tree.flatten(marked)
        places = [None] * len(leaves) if free is None else tree.leaves(free)

        def cast(leaf: Any, place: Any) -> Any:
            # frozen leaves are cast where they are read: they may be mapped from a file, and larger than memory
            if isinstance(leaf, Frozen) or self._is_main(leaf):
                return leaf
            return leaf.to(self._compute_dtype) if place is None else place.copy_(leaf)

        return tree.unflatten(structure, list(map(cast, leaves, places)))

    def _is_main(self, leaf: Tensor) -> bool:
        """Returns whether the optimizer's copy of a leaf is its main copy too."""
        return self._compute_dtype is None or leaf.dtype == self._compute_dtype

    def _given(self, stale: Params, main: Params) -> dict[str, Any]:
        """Returns the copies that a run before this one was to compute with next, in the dtypes of this one's: they may
        be written over one day.
        """

        def like(leaf: Any, place: Any) -> Any:
            if isinstance(leaf, Frozen):
                return leaf
            return dense(leaf).to(place.dtype, copy=self._donate)

        marked = mark(stale, self._frozen)
        return {name: tree.map(like, marked[name], main[name]) for name in self.names}


def _unmarked(params: Params) -> Params:
    return dict(tree.map(lambda leaf: leaf.tensor if isinstance(leaf, Frozen) else leaf, dict(params)))
