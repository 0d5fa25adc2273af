"""`rpfunc roofline`: from which microbatch on transfers hide behind computation, for known models and hardware."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from rpfunc.checks import count_problems
from rpfunc.cli.tables import Column, tables
from rpfunc.errors import OptionsError
from rpfunc.plan.decoders import DECODERS, decoder_shape
from rpfunc.plan.presets import ACCELERATORS, machine
from rpfunc.plan.roofline import Roofline, roofline_table


@dataclass(frozen=True)
class RooflineOptions:
    """What is looked up. Raises OptionsError listing what cannot be."""

    model: str = "all"
    """Names of known decoders with commas between, or all."""
    hardware: str = "all"
    """Workers and their kind, such as 8x4090 or h100, with commas between, or all."""
    microbatches: int = 16
    """Of an iteration."""
    rows: int = 2048
    """Tokens of a sequence."""
    efficiency: float = 0.75
    """Share of the hardware's dense 16-bit rate that layers reach."""

    def __post_init__(self) -> None:
        problems = count_problems({"microbatches": self.microbatches, "rows": self.rows})
        if problems:
            raise OptionsError.listing("roofline", problems)


def roofline_command(console: Console, options: RooflineOptions, as_json: bool) -> int:
    """Prints the table; returns the exit status."""
    shapes = DECODERS if options.model == "all" else [decoder_shape(name) for name in _names(options.model)]
    every = [accelerator.name for accelerator in ACCELERATORS]
    machines = every if options.hardware == "all" else _names(options.hardware)
    for name in machines:
        machine(name, efficiency=options.efficiency)  # which raises for what is unknown
    rows = roofline_table(shapes, machines, options.rows, efficiency=options.efficiency)
    if as_json:
        found = [
            {"model": model, "hardware": name, **roofline_record(line, options.microbatches)}
            for model, name, line in rows
        ]
        record = {**asdict(options), "rooflines": found}
        console.print(json.dumps(record), markup=False, highlight=False, soft_wrap=True)
        return 0
    lines = [line for _, _, line in rows]
    columns = [
        *(Column(kind, [f"{getattr(line, kind):g}" for line in lines]) for kind in Roofline._fields),
        Column("microbatch", [f"{microbatch(line, options.microbatches):g}" for line in lines]),
    ]
    names = Column("model, hardware", [f"{model}, {name}" for model, name, _ in rows])
    for table in tables(names, columns, console.width):
        console.print(table)
    console.print(
        f"forward, fused, backward: the fewest sequences of {options.rows} tokens that a run of such a slot needs so "
        "that its transfers take no longer than its computation; a run is all microbatches that a worker does of a "
        f"slot. microbatch: sequences of one, with {options.microbatches} in a run. inf: never",
        highlight=False,
    )
    return 0


def microbatch(found: Roofline, microbatches: int) -> float:
    """Returns the fewest sequences in a microbatch for which the transfers of a run of slots of any kind hide."""
    return found.run if found.run == math.inf else max(1, math.ceil(found.run / microbatches))


def roofline_record(found: Roofline, microbatches: int) -> dict[str, float | None]:
    """Returns a roofline for JSON, which has no infinity: null."""
    numbers = {**found._asdict(), "run": found.run, "microbatch": microbatch(found, microbatches)}
    return {name: None if number == math.inf else number for name, number in numbers.items()}


def _names(text: str) -> Sequence[str]:
    return [name.strip() for name in text.split(",")]
