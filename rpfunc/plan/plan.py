"""Plans: how a model's layers are grouped into stages, forward and backward apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rpfunc.checks import shown
from rpfunc.errors import PlanError


class Span(NamedTuple):
    """Layers start to stop, half open; printed `2:5`."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True)
class Plan:
    """Stages: forward groups, at most one fused stage at the turn, backward groups.

    forward   spans that cover layers 0 to the fused stage, in ascending order
    fused     the last layers, run forward and backward in one task: their forward serves as the recomputation; None:
              forward and backward both cover all layers, as classic pipelines have it
    backward  spans that cover the same layers as `forward`, in *ascending* order, cut wherever one likes; none at all
              where nothing is trained (a reference model)

    Stages of a kind are numbered by their first layer, so forward stage 2 and backward stage 2 are the same layers
    where both are cut alike. The fused stage has the number after the last forward stage.
    Source: RoundPipe (arXiv 2604.27085), asymmetric split.

    >>> Plan.parse("F0:6 X6:8 B0:2 B2:4 B4:6").slots
    [('F', 0), ('X', 1), ('B', 2), ('B', 1), ('B', 0)]
    >>> Plan.symmetric(8, [0, 5]).slots
    [('F', 0), ('F', 1), ('B', 1), ('B', 0)]
    """

    forward: tuple[Span, ...]
    fused: Span | None
    backward: tuple[Span, ...]

    @classmethod
    def single(cls, num_layers: int) -> Plan:
        """Returns the plan with the fused stage alone: plain backpropagation, or StreamBP where layers stream."""
        return cls((), Span(0, num_layers), ())

    @classmethod
    def cut(cls, num_layers: int, forward: Sequence[int], backward: Sequence[int]) -> Plan:
        """Returns the plan whose stages start at the given layers; both must begin with 0 and end with fused.start.

        >>> str(Plan.cut(8, forward=[0, 6], backward=[0, 2, 6]))
        'F0:6 X6:8 B0:2 B2:6'
        """
        spans = [tuple(map(Span, cuts[:-1], cuts[1:])) for cuts in (forward, backward)]
        if not forward or not backward or forward[-1] != backward[-1]:
            raise PlanError(
                f"plan: forward cuts {list(forward)} and backward cuts {list(backward)} must end at one layer"
            )
        return cls(spans[0], Span(forward[-1], num_layers), spans[1])

    @classmethod
    def symmetric(cls, num_layers: int, starts: Sequence[int]) -> Plan:
        """Returns the plan whose stages, the same forward and backward and none fused, start at the given layers.

        >>> str(Plan.symmetric(8, [0, 3]))
        'F0:3 F3:8 B0:3 B3:8'
        """
        spans = tuple(map(Span, starts, [*starts[1:], num_layers]))
        return cls(spans, None, spans)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Returns the plan that `str` prints so; its words may stand in any order."""
        words = text.split()
        found = [(word, re.fullmatch(r"([FXB])([0-9]{1,9}):([0-9]{1,9})", word)) for word in words]
        problems = [
            f"{shown(word)} is no stage, needs F, X or B and layers, as in 'F0:6'" for word, match in found if not match
        ]
        stages = sorted((m[1], Span(int(m[2]), int(m[3]))) for _, m in found if m)
        fused = [span for kind, span in stages if kind == "X"]
        if len(fused) > 1:
            problems.append(f"has {len(fused)} fused stages (X), at most one can be at the turn")
        if not stages:
            problems.append("has no stage, needs at least one, as in 'X0:8'")
        if problems:
            raise PlanError.listing(f"plan {shown(text)}", problems)
        forward, backward = (tuple(span for kind, span in stages if kind == wanted) for wanted in "FB")
        return cls(forward, fused[0] if fused else None, backward)

    def __str__(self) -> str:
        words = {"F": self.forward, "X": (self.fused,) if self.fused else (), "B": self.backward}
        return " ".join(f"{kind}{span}" for kind, spans in words.items() for span in spans)

    @property
    def num_layers(self) -> int:
        """How many layers the plan covers."""
        return max((span.stop for span in (*self.forward, self.fused, *self.backward) if span is not None), default=0)

    @property
    def slots(self) -> list[tuple[str, int]]:
        """The stages as (kind, stage) in the order in which a microbatch passes them."""
        return (
            [("F", stage) for stage in range(len(self.forward))]
            + ([("X", len(self.forward))] if self.fused else [])
            + [("B", stage) for stage in reversed(range(len(self.backward)))]
        )

    def span(self, kind: str, stage: int) -> Span:
        """Returns the layers of a stage; I and W are the parts of B. Raises PlanError if there is none such."""
        fused = (None,) * len(self.forward) + (self.fused,)
        spans = {"F": self.forward, "X": fused, "B": self.backward, "I": self.backward, "W": self.backward}.get(
            kind, ()
        )
        span = spans[stage] if 0 <= stage < len(spans) else None
        if span is None:
            raise PlanError(
                f"plan '{self}': has no stage {stage}{kind}, there are {[f'{s}{k}' for k, s in self.slots]}"
            )
        return span

    def check(self, num_layers: int, *, trained: bool = True) -> None:
        """Raises PlanError listing all `faults`."""
        problems = self.faults(num_layers, trained=trained)
        if problems:
            raise PlanError.listing(f"plan '{self}'", problems)

    def faults(self, num_layers: int, *, trained: bool = True) -> list[str]:
        """Returns, in words, every layer that a kind of stage misses, repeats or has out of order.

        A model that is not trained may go without backward stages.
        """
        turn = (self.fused,) if self.fused else ()
        directions = {"forward": self.forward + turn, "backward": self.backward + turn}
        if not trained and not directions["backward"]:
            del directions["backward"]
        return [fault for kind, spans in directions.items() for fault in span_faults(kind, spans, num_layers)]


def span_faults(kind: str, spans: Sequence[Span], num_layers: int | None = None) -> list[str]:
    """Returns, in words, what spans of a kind leave out, repeat or have out of order, up to `num_layers` if given."""
    problems = []
    place = 0
    for span in spans:
        if span.start != place:
            verb = "leaves out" if span.start > place else "repeats"
            low, high = sorted((place, span.start))
            problems.append(f"{kind} {verb} layers {low}:{high} before {span}")
        if span.stop <= span.start:
            problems.append(f"{kind} has the empty stage {span}")
        place = span.stop
    if num_layers not in (place, None):
        problems.append(f"{kind} ends at layer {place}, the model has {num_layers} layers")
    return problems
