"""`rpfunc simulate`: schedules of a known model on known hardware, as a table, pictures and traces."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from rpfunc.checks import count_problems
from rpfunc.cli.roofline import microbatch, roofline_record
from rpfunc.cli.tables import Column, tables
from rpfunc.errors import OptionsError
from rpfunc.files import replace_file
from rpfunc.plan.compare import SCHEDULES, Compared, compare
from rpfunc.plan.decoders import decoder_costs, decoder_shape
from rpfunc.plan.presets import machine
from rpfunc.plan.roofline import decoder_roofline
from rpfunc.schedule.draw import draw
from rpfunc.schedule.gantt import LEAST_WIDTH, gantt
from rpfunc.schedule.units import unit_of

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
        problems = count_problems({name: count for name, count in counts.items() if count is not None})
        unknown = [name for name in self.names if name not in SCHEDULES]
        if unknown:
            problems.append(f"schedule: there is no {', '.join(unknown)}, there are all, {', '.join(SCHEDULES)}")
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            problems.append(f"schedule: {', '.join(twice)} stands there more than once")
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
    limits, memory_bytes = decoder_roofline(shape, found, options.rows), found.hardware.memory_bytes
    hidden = microbatch(limits, options.microbatches)
    sequences = options.sequences or (1 if hidden == math.inf else int(hidden))
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
                title = f"{shape.name}, {options.hardware}: {row.name}"
                replace_file(target, partial(draw, row.timeline, title=title))
            else:
                text = row.timeline.chrome_trace()
                replace_file(target, partial(Path.write_text, data=text))
            if not as_json:
                console.print(f"wrote {target}", highlight=False)
    if as_json:
        record = {
            **asdict(options),
            "sequences": sequences,
            "memory_bytes": memory_bytes,
            "roofline": roofline_record(limits, options.microbatches),
            "rows_by_schedule": [_record(row, memory_bytes) for row in compared],
        }
        console.print(json.dumps(record), markup=False, highlight=False, soft_wrap=True)
        return 0
    console.print(
        f"{shape.name} ({shape.num_parameters / 1e9:.1f} B parameters) on {options.hardware}, {options.microbatches} "
        f"microbatches of {sequences} x {options.rows} tokens; transfers hide from {limits.run:g} sequences a run",
        highlight=False,
    )
    _print_tables(console, compared, memory_bytes)
    left_out = [name for name in options.names if name not in {row.name for row in compared}]
    if left_out:
        console.print(f"{', '.join(left_out)}: {len(layers)} layers are too few for a stage each", highlight=False)
    if len(compared) == 1:
        console.print(gantt(compared[0].timeline, max(LEAST_WIDTH, min(console.width, 120))))
    return 0


def _print_tables(console: Console, compared: Sequence[Compared], memory_bytes: float) -> None:
    reports = [row.report for row in compared]
    times = [report.makespan for report in reports]
    unit = unit_of(min(times))
    peaks = [max(report.peak_bytes) for report in reports]
    columns = [
        Column("slots", [str(len(row.plan.slots)) for row in compared]),
        Column(unit.name, [f"{time * unit.per_second:.3f}" for time in times]),
        Column("idle %", [_percent(report.bubble) for report in reports]),
        Column("ends %", [_percent(report.fill_drain) for report in reports]),
        Column("waits %", [_percent(report.waits) for report in reports]),
        Column("stalls %", [_percent(report.stalls) for report in reports]),
        Column("joined %", ["" if row.steady_bubble is None else _percent(row.steady_bubble) for row in compared]),
        Column("peak GB", [f"{'! ' if peak > memory_bytes else ''}{peak / GB:.1f}" for peak in peaks]),
        Column("moved GB", [f"{(report.uploaded_bytes + report.downloaded_bytes) / GB:.1f}" for report in reports]),
    ]
    names = Column("schedule", [row.name for row in compared])
    for table in tables(names, columns, console.width, bold=times.index(min(times))):
        console.print(table)
    console.print(
        "idle: share of the workers' time in one iteration; of it ends: before the first and after the last task, "
        "waits: between tasks, stalls: for transfers. joined: idle where iterations follow each other, one update late."
        f" peak: of the worker that needs most, !: beyond its {memory_bytes / GB:.0f} GB. moved: between host and "
        "workers",
        highlight=False,
    )


def _percent(part: float) -> str:
    return f"{100 * max(part, 0.0):.1f}"  # differences of equal sums may lie just below 0


def _record(row: Compared, memory_bytes: float) -> dict[str, Any]:
    steady = row.steady_deal
    return {
        "schedule": row.name,
        "plan": str(row.plan),
        "ways": row.deal.ways,
        **asdict(row.report),
        "fits_memory": max(row.report.peak_bytes) <= memory_bytes,
        "steady_bubble": row.steady_bubble,
        "steady_time": row.steady_time,
        "steady_plan": None if steady is None else str(steady.plan),
        "steady_ways": None if steady is None else steady.ways,
    }


def _paths(path: Path | None, compared: Sequence[Compared], suffix: str) -> list[Path]:
    """Returns one path a schedule: the given one where there is one schedule, else with each schedule's name in it."""
    if path is None:
        return []
    path = path if path.suffix else path.with_suffix(suffix)
    if len(compared) == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{row.name}{path.suffix}") for row in compared]
