"""The loss curve as a picture; needs the `plot` extra (matplotlib)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def draw_loss(records: Iterable[Mapping[str, Any]], path: Path, title: str) -> None:
    """Writes a PNG of the training and held-out loss, in bits per byte over steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    records = list(records)
    trained = [(record["step"], record["bits_per_byte"]) for record in records if "bits_per_byte" in record]
    held_out = [
        (record["step"], record["held_out_bits_per_byte"]) for record in records if "held_out_bits_per_byte" in record
    ]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if trained:
        axes.plot(*zip(*trained, strict=True), color="#9ecae9", linewidth=1, label="training batch")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="#e45756", marker="o", markersize=4, label="held-out text")
        step, bits = held_out[-1]
        axes.annotate(
            f"{bits:.2f}", (step, bits), xytext=(0, 8), textcoords="offset points", ha="center", color="#e45756"
        )
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
