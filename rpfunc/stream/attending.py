"""Attending layers: an output row depends on the same input row and on keys and values of rows up to its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from rpfunc.batch import Batch
from rpfunc.checks import is_count, plain_number, shown
from rpfunc.errors import ModelError
from rpfunc.model import Flat
from rpfunc.stream.accumulate import vjp_into
from rpfunc.stream.bidirectional import Bidirectional
from rpfunc.stream.flat import floating
from rpfunc.stream.form import Pullback, Stepping
from rpfunc.stream.memory import RowMemory
from rpfunc.stream.split_attention import split_attention
from rpfunc.stream.transforms import running_transforms
from rpfunc.stream.writes import reading
from rpfunc.sums import Sums

KeysValues = Callable[[Any, Any, Batch], Any]
Rows = Callable[[Any, Any, Any, Batch], Any]


def attending(
    kv: KeysValues, rows: Rows, *, causal: bool = True, window: int | None = None
) -> Attending | Bidirectional:
    """Returns the form of `rows(params, x, kv, batch) -> y` over `kv(params, x, batch)`, which is row-wise.

    `kv` gives any pytree of leaves (B, T, ...): keys, values, segment ids, whatever a row shows to others. `rows`
    computes output rows from their own input rows and the kv that they may see. Causal: kv from row 0 (with a window:
    from window - 1 rows before the chunk's first) to the chunk's last row, so that the chunk is the *last*
    `x.shape[1]` of them; each row must mask what comes after it and what lies outside its own window, as `attend`
    does. Not causal: kv of all rows. A window counts the row itself.
    Raises ModelError for a window below 1 or without causal.
    """
    window = plain_number(window)
    if window is not None and (not is_count(window) or window < 1 or not causal):
        raise ModelError(
            f"attending: window is {shown(window)} with causal={causal}; a window is a whole number from 1 and needs "
            "causal=True "
            "(None: no window)"
        )
    return Attending(kv, rows, window) if causal else Bidirectional(kv, rows)


@dataclass(frozen=True)
class Attending(Stepping):
    """See `attending`, causal. A row leaves its kv."""

    kv: KeysValues
    rows: Rows
    window: int | None = None

    def full(self, params: Any, x: Any, batch: Batch) -> Any:
        """Returns the output for whole rows."""
        return self._see(params, x, self.kv(params, x, batch), batch)

    def leave(self, params: Any, x: Any, past: Any, batch: Batch) -> Any:
        """Returns the rows' kv."""
        del past
        return self.kv(params, x, batch)

    def advance(
        self, params: Any, x: Any, batch: Batch, memory: RowMemory, start: int, stop: int, num_rows: int
    ) -> Any:
        """Returns the output rows start to stop of `num_rows`, and keeps their kv; what is seen is a view of it."""
        memory.keep(self.kv(params, x, batch), start, stop, num_rows)
        return self._see(params, x, memory.past(start, stop), batch)

    def linearize_step(
        self, params: Any, x: Any, batch: Batch, memory: RowMemory, start: int, stop: int
    ) -> tuple[Any, Pullback]:
        """Returns (output rows, pullback) of the chunk of rows start to stop; later chunks come through it first.

        What is seen is a view of the kept rows, never joined to the chunk's own.
        """
        if not memory.holds(stop):
            memory.keep(self.kv(params, x, batch), start, stop, stop)

        reached: list[bool] = []

        def step(params: Any, x: Any) -> Any:
            seen = _look_back(self.kv(params, x, batch), memory, start, stop, reached.append)
            with _Receiving(memory, start, floating(seen)[0]):
                return self._see(params, x, seen, batch)

        output, pull = vjp_into(step, params, x)

        def pullback(cotangent: Flat, grads: Sums | None) -> tuple[Flat, Sums]:
            grads, (dx,) = pull(cotangent, grads)
            later = () if reached else memory.cotangent(start, stop) or ()
            if later:  # these rows do not read what they leave, later ones do
                _, pull_kv = vjp_into(lambda params, x: self.kv(params, x, batch), params, x)
                grads, (through_kv,) = pull_kv(later, grads)
                dx = tuple(a + b for a, b in zip(dx, through_kv, strict=True))
            return dx, grads

        return output, pullback

    def _see(self, params: Any, x: Any, kv: Any, batch: Batch) -> Any:
        return reading("kv", kv, self.rows, params, x, kv, batch)

    def memory(self) -> RowMemory:
        """Returns an empty memory of kv."""
        return RowMemory(self.window)

    def precompose(self, function: Callable[[Any], Any]) -> Attending:
        """Returns the form that applies `function` to its parameters first."""
        return Attending(
            lambda params, x, batch: self.kv(function(params), x, batch),
            lambda params, x, kv, batch: self.rows(function(params), x, kv, batch),
            self.window,
        )


def _look_back(left: Any, memory: RowMemory, start: int, stop: int, reached: Callable[[bool], None]) -> Any:
    """Returns what rows start to stop see: earlier rows and `left`, their own, which the memory holds already.

    `reached` is called when cotangents come back through here.
    """
    own_rows, _ = floating(left)
    _, rebuild = floating(memory.past(start, stop))
    return rebuild(_LookBack.apply(memory, start, stop, reached, *own_rows) if own_rows else ())  # type: ignore[no-untyped-call]


class _LookBack(Function):
    """On the way back, rows' cotangents are complete here: later chunks have been received, and this one is."""

    @staticmethod
    def forward(memory: RowMemory, start: int, stop: int, reached: Callable[[bool], None], *own_rows: Tensor) -> Flat:
        return floating(memory.past(start, stop))[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Flat) -> None:
        ctx.memory, ctx.start, ctx.stop, ctx.reached = inputs[:4]
        ctx.nothing = (None,) * len(inputs[4:])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.reached(True)
        ctx.memory.receive(cotangents, ctx.start)
        return None, None, None, None, *(ctx.memory.cotangent(ctx.start, ctx.stop) or ctx.nothing)


class _Receiving(TorchFunctionMode):
    """Lets attention over what was looked back at add its cotangents to the memory's, where `_LookBack` finds them.

    They are as long as all rows so far: two of them are not made beside the sums.
    """

    def __init__(self, memory: RowMemory, start: int, seen: Flat) -> None:
        self._memory, self._start = memory, start
        self._places = {id(leaf): index for index, leaf in enumerate(seen)}
        self._outside = running_transforms()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # what comes back through a further transform is no cotangent of the layer's
        if function is not split_attention or running_transforms() != self._outside:
            return function(*args, **(kwargs or {}))
        query, key, value, scale, _ = args
        places = [self._places[id(part)] for part in (key, value) if id(part) in self._places]
        if len(places) < 2:
            return function(*args)

        def receive(rows: slice, *parts: Tensor) -> None:
            for place, part in zip(places, parts, strict=True):
                self._memory.receive_rows(place, rows, part, self._start)

        return split_attention(query, key, value, scale, receive)
