"""Drawing a timeline as a picture; needs the `plot` extra (matplotlib)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from rpfunc.schedule.timeline import HOST, KIND_NAMES, Event, Timeline, every_second_stage
from rpfunc.schedule.units import Unit, unit_of

COLOURS = {"F": "#4c78a8", "X": "#e45756", "B": "#f2a73b", "I": "#72b7b2", "W": "#b279a2"}
LIGHTER = {"F": "#7ba3cc", "X": "#ee8a89", "B": "#f7c77d", "I": "#9fd0cc", "W": "#cba3c0"}

OTHERS = {
    "activation_upload": ("#54a24b", "activations"),
    "activation_download": ("#54a24b", "activations"),
    "parameter_upload": ("#79706e", "parameters"),
    "gradient_download": ("#b5894f", "gradients"),
    "update": ("#bab0ac", "update"),
}
"""Colours and names of what is not computed by a worker."""


class Lane(NamedTuple):
    """What part of a worker's row, which is 1 high, a channel takes."""

    top: float
    height: float

    @property
    def middle(self) -> float:
        """Where a label goes."""
        return self.top + self.height / 2


ALONE = {"compute": Lane(0.1, 0.8), "update": Lane(0.1, 0.8)}
WITH_TRANSFERS = {
    "compute": Lane(0.06, 0.5),
    "activation_upload": Lane(0.6, 0.14),
    "parameter_upload": Lane(0.6, 0.14),
    "activation_download": Lane(0.78, 0.14),
    "gradient_download": Lane(0.78, 0.14),
    "update": Lane(0.06, 0.5),
}
"""A link does one transfer at a time, so one lane for a direction is enough."""


LEAST_HEIGHT = 0.3
"""Inches that a worker's row needs for letters in it, and for the names of its links."""

LEAST_SHARE = 1 / 1100
"""Of the width: what a box takes at least, more than a dot, so that nothing that happened is lost."""

EDGED = 8
"""From how many times that on a box has an edge."""

LETTERS = 155
"""That a line has room for."""


class Look(NamedTuple):
    """Where boxes are drawn, and how."""

    row: int
    channel: str
    colour: str
    edge: float


def draw(timeline: Timeline, path: str | Path, title: str = "", *, unit: str | None = None) -> None:
    """Writes a PNG or SVG (by the suffix of `path`): one row a worker, one box a task, coloured by kind.

    The shade changes where a worker goes on to another stage. Transfers, where there are any, are drawn as two thin
    lanes, uploads above downloads; the optimizer's updates in a row of the host. Time begins with the first event. What
    is shorter than a dot is drawn as one, so that many of them next to each other look like one long one.
    `unit` names the unit of time if the timeline is not in seconds, which are shown as s, ms or µs, by the length.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    events = timeline.shown
    scale = unit_of(float(timeline.makespan_s)) if unit is None else Unit(unit, 1.0)
    lanes = WITH_TRANSFERS if any(event.channel not in ALONE for event in events) else ALONE
    names = [f"worker {worker}" for worker in range(timeline.num_workers)]
    names += ["host"] if any(event.worker == HOST for event in events) else []
    height = max(0.16, min(0.55 if lanes is ALONE else 0.75, 14 / len(names)))
    figure = Figure(figsize=(12, max(2.4, 1.2 + height * len(names))), layout="constrained")
    axes = figure.add_subplot()
    _draw_boxes(axes, events, lanes, timeline, scale.per_second, lettered=height >= LEAST_HEIGHT)
    axes.set_yticks([row + lanes["compute"].middle for row in range(len(names))], names, fontsize=min(10, 60 * height))
    if lanes is WITH_TRANSFERS and height >= LEAST_HEIGHT:
        links = {"up": lanes["activation_upload"], "down": lanes["activation_download"]}
        places = [worker + lane.middle for worker in range(timeline.num_workers) for lane in links.values()]
        axes.set_yticks(places, [*links] * timeline.num_workers, minor=True, fontsize=6)
    axes.tick_params(axis="y", which="both", length=0)
    axes.set_ylim(len(names), 0)
    axes.margins(x=0)
    axes.set_xlabel(f"time ({scale.name})")
    axes.set_title(f"{title}   idle {float(timeline.bubble):.0%} of the workers' time".strip(), loc="left")
    kinds = {event.task.kind for event in events if event.channel == "compute"}
    named = {name: COLOURS[kind] for kind, name in KIND_NAMES.items() if kind in kinds}
    channels = {event.channel for event in events}
    named |= {name: colour for channel, (colour, name) in OTHERS.items() if channel in channels}
    handles = [Patch(color=colour, label=name) for name, colour in named.items()]
    notes = ["lighter: every\nsecond stage"] if every_second_stage(timeline) else []
    notes += ["thin lanes: links,\nup above down"] if lanes is WITH_TRANSFERS else []
    legend = figure.legend(handles=handles, loc="outside right upper", frameon=False, title="\n".join(notes))
    legend.get_title().set(fontsize="small", fontstyle="italic")
    figure.savefig(path, dpi=150)


def _draw_boxes(
    axes: Any, events: list[Event], lanes: dict[str, Lane], timeline: Timeline, scale: float, *, lettered: bool
) -> None:
    lighter = every_second_stage(timeline)
    first = float(min((event.start_s for event in events), default=0.0))
    last = float(max((event.end_s for event in events), default=0.0))
    whole = (last - first) * scale
    least = whole * LEAST_SHARE
    letters: dict[str, int] = defaultdict(int)
    for event in events:
        letters[event.task.kind] = max(letters[event.task.kind], len(str(event.task)))
    boxes: dict[Look, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        row = timeline.num_workers if event.worker == HOST else event.worker
        start, width = (float(event.start_s) - first) * scale, float(event.end_s - event.start_s) * scale
        edge = 0.0
        if event.channel == "compute":
            kind = event.task.kind
            colour = (LIGHTER if event.task in lighter else COLOURS)[kind]
            edge = 0.5 if width > EDGED * least else 0.0  # edges would hide smaller boxes
            # boxes of a kind that are alike have a label all or none, so the longest has to fit
            if lettered and width * LETTERS > (letters[kind] + 0.3) * whole:
                middle = start + width / 2, row + lanes["compute"].middle
                axes.text(*middle, str(event.task), ha="center", va="center", fontsize=7, zorder=5)
        else:
            colour, _ = OTHERS[event.channel]
        boxes[Look(row, event.channel, colour, edge)].append((min(start, whole - least), max(width, least)))
    for (row, channel, colour, edge), own in boxes.items():
        lane = lanes[channel]
        axes.broken_barh(
            own,
            (row + lane.top, lane.height),
            facecolors=colour,
            edgecolor="white",
            linewidth=edge,
            # above the frame; activations are short, and pause the others
            zorder=4 if "activation" in channel else 3,
        )
    axes.set_xlim(0, whole or 1)
