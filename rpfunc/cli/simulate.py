"""`rpfunc simulate`: schedules of a known model on known hardware, as a table, pictures and traces."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rpfunc.errors import OptionsError
from rpfunc.plan.compare import SCHEDULES, Compared, compare
from rpfunc.plan.decoders import decoder_costs, decoder_shape
from rpfunc.plan.presets import machine
from rpfunc.plan.roofline import decoder_roofline
from rpfunc.schedule.draw import draw
from rpfunc.schedule.gantt import gantt

GB = 1e9


@dataclass(frozen=True)
class SimulateOptions:
    """What is simulated. Raises OptionsError listing what cannot be."""

    model: str = "llama-3.1-8b"
    """Name of a known decoder."""
    hardware: str = "8x4090"
    """Workers and their kind, such as 8x4090 or 4xh100."""
    microbatches: int = 16
    """Of an iteration."""
    rows: int = 2048
    """Tokens of a sequence."""
    sequences: int | None = None
    """Of a microbatch; none: as many as it takes for transfers to hide behind computation."""
    schedule: str = "all"
    """Names with commas between, or all."""
    efficiency: float = 0.75
    """Share of the hardware's dense 16-bit rate that layers reach."""

    def __post_init__(self) -> None:
        counts = {"microbatches": self.microbatches, "rows": self.rows, "sequences": self.sequences}
        problems = [
            f"{name} is {count}, it must be at least 1"
            for name, count in counts.items()
            if count is not None and count < 1
        ]
        unknown = [name for name in self.names if name not in SCHEDULES]
        if unknown:
            problems.append(f"schedule: there is no {', '.join(unknown)}, there are all, {', '.join(SCHEDULES)}")
        if problems:
            raise OptionsError.listing("simulate", problems)

    @property
    def names(self) -> Sequence[str]:
        """The schedules that are meant."""
        return SCHEDULES if self.schedule == "all" else [name.strip() for name in self.schedule.split(",")]


def simulate_command(
    console: Console, options: SimulateOptions, plot: Path | None, trace: Path | None, as_json: bool
) -> int:
    """Simulates and prints; returns the exit status."""
    shape, found = decoder_shape(options.model), machine(options.hardware, efficiency=options.efficiency)
    runs = decoder_roofline(shape, found, options.rows).run
    sequences = options.sequences or (1 if runs == math.inf else max(1, math.ceil(runs / options.microbatches)))
    layers = decoder_costs(shape, options.rows, sequences, flops_per_s=found.flops_per_s)
    compared = list(compare(layers, found.num_workers, options.microbatches, found.hardware, options.names))
    if not compared:
        raise OptionsError(
            f"simulate: {options.schedule} needs a layer for each stage, {shape.name} has {len(layers)} layers for "
            f"{found.num_workers} workers; fewer workers would do"
        )
    for path, suffix in ((plot, ".png"), (trace, ".json")):
        for row, target in zip(compared, _paths(path, compared, suffix), strict=False):
            if suffix == ".png":
                draw(row.timeline, target, f"{shape.name}, {options.hardware}: {row.name}")
            else:
                target.write_text(row.timeline.chrome_trace())
            if not as_json:
                console.print(f"wrote {target}", highlight=False)
    if as_json:
        record = {**asdict(options), "sequences": sequences, "rows_by_schedule": [_record(row) for row in compared]}
        console.print(json.dumps(record), markup=False, highlight=False, soft_wrap=True)
        return 0
    console.print(
        f"{shape.name} ({shape.num_parameters / 1e9:.1f} B parameters) on {options.hardware}, {options.microbatches} "
        f"microbatches of {sequences} x {options.rows} tokens; transfers hide from {runs:g} sequences a run",
        highlight=False,
    )
    console.print(_table(compared, found.hardware.memory_bytes))
    if len(compared) == 1:
        console.print(gantt(compared[0].timeline, min(console.width, 120)))
    return 0


def _table(compared: Sequence[Compared], memory_bytes: float) -> Table:
    table = Table()
    columns = ("schedule", "slots", "seconds", "idle", "ends", "waits", "stalls", "joined", "GB peak", "GB moved")
    for column in columns:
        table.add_column(column, justify="left" if column == "schedule" else "right", no_wrap=True)
    fastest = min(compared, key=lambda row: row.report.makespan)
    for row in compared:
        report = row.report
        cells = [row.name, str(len(row.plan.slots)), f"{report.makespan:.3f}"]
        cells += map(_share, (report.bubble, report.fill_drain, report.waits, report.stalls))
        cells.append("" if row.steady_bubble is None else _share(row.steady_bubble))
        peak = max(report.peak_bytes)
        cells.append(f"{peak / GB:.1f}{' !' if peak > memory_bytes else ''}")
        cells.append(f"{(report.uploaded_bytes + report.downloaded_bytes) / GB:.0f}")
        table.add_row(*cells, style="bold" if row is fastest else None)
    table.caption = (
        "idle: share of the workers' time in one iteration; of it ends: before the first and after the last task, "
        "waits: between tasks, stalls: for transfers. joined: idle where iterations follow each other, one update late."
        f" GB moved: between host and workers. !: beyond a worker's {memory_bytes / GB:.0f} GB"
    )
    table.caption_justify = "left"
    return table


def _share(part: float) -> str:
    return f"{max(part, 0.0):.1%}"  # differences of equal sums may lie just below 0


def _record(row: Compared) -> dict[str, Any]:
    return {
        "schedule": row.name,
        "plan": str(row.plan),
        **asdict(row.report),
        "steady_bubble": row.steady_bubble,
        "steady_time": row.steady_time,
    }


def _paths(path: Path | None, compared: Sequence[Compared], suffix: str) -> list[Path]:
    """Returns one path a schedule: the given one where there is one schedule, else with each schedule's name in it."""
    if path is None:
        return []
    path = path if path.suffix else path.with_suffix(suffix)
    if len(compared) == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{row.name}{path.suffix}") for row in compared]
