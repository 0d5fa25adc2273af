"""Drawing a timeline as a picture; needs the `plot` extra (matplotlib)."""

from __future__ import annotations

from pathlib import Path

from rpfunc.schedule.timeline import Timeline

COLOURS = {"F": "#4c78a8", "X": "#e45756", "B": "#f2a73b", "I": "#72b7b2", "W": "#b279a2"}
LABELS = {"F": "forward", "X": "fused", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def draw(timeline: Timeline, path: str | Path, title: str = "") -> None:
    """Writes a PNG or SVG (by the suffix of `path`): one row a worker, one box a task, coloured by kind."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    origin = min((event.start_s for event in timeline.events), default=0.0)
    figure = Figure(figsize=(12, 1.2 + 0.55 * timeline.num_workers), layout="constrained")
    axes = figure.add_subplot()
    for event in timeline.events:
        start_ms, width_ms = (event.start_s - origin) * 1e3, (event.end_s - event.start_s) * 1e3
        axes.broken_barh(
            [(start_ms, width_ms)],
            (event.worker - 0.4, 0.8),
            facecolors=COLOURS[event.task.kind],
            edgecolor="white",
            linewidth=0.5,
        )
        if width_ms > timeline.makespan_s * 1e3 / 45:
            axes.text(start_ms + width_ms / 2, event.worker, str(event.task), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(timeline.num_workers), [f"worker {worker}" for worker in range(timeline.num_workers)])
    axes.invert_yaxis()
    axes.margins(x=0)
    axes.set_xlabel("time (ms)")
    axes.set_title(f"{title}   idle {timeline.bubble:.0%} of the workers' time".strip(), loc="left")
    kinds = sorted({event.task.kind for event in timeline.events}, key=list(COLOURS).index)
    handles = [Patch(color=COLOURS[kind], label=LABELS[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)
