"""The folder of a run: its options, metrics and checkpoint, each written so that a killed process loses little."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rpfunc.errors import OptionsError
from rpfunc.files import replace_file
from rpfunc.train.options import TrainOptions


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its files."""

    path: Path

    @property
    def options(self) -> Path:
        """The run's options, as JSON."""
        return self.path / "options.json"

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return self.path / "checkpoint.safetensors"

    @property
    def metrics(self) -> Path:
        """One JSON object a line, for each step and each evaluation."""
        return self.path / "metrics.jsonl"

    def create(self, options: TrainOptions) -> None:
        """Makes the folder and writes the options. Raises OptionsError if it exists: nothing is ever overwritten."""
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            hint = f"give another --out, or continue it with --resume {self.path}"
            raise OptionsError(f"out: cannot make {self.path}: {error.strerror}; {hint}") from error
        self.options.write_bytes(msgspec.json.format(msgspec.json.encode(options), indent=2))

    def read_options(self) -> TrainOptions:
        """Returns the options the run was started with. Raises OptionsError if there are none that can be read."""
        try:
            return read_options(self.options.read_bytes())
        except OSError as error:
            raise OptionsError(f"run {self.path}: cannot read {self.options.name}: {error.strerror}") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise OptionsError(f"run {self.path}: {self.options.name} is not a run's options: {error}") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one line to the metrics."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """Yields the metrics' lines; a last one that was cut short is left out."""
        if self.metrics.exists():
            try:
                records = [json.loads(line) for line in self.metrics.read_text().split("\n")[:-1]]
                if not all(isinstance(record.get("step"), int) for record in records):
                    raise ValueError("a line has no step")
            except (ValueError, AttributeError) as error:
                raise OptionsError(f"run {self.path}: {self.metrics.name} cannot be read: {error}") from error
            yield from records

    def rewind(self, step: int) -> None:
        """Drops the metrics of steps after `step`: a resumed run does those again."""
        kept = [json.dumps(record) + "\n" for record in self.records() if record["step"] <= step]
        replace_file(self.metrics, lambda beside: beside.write_text("".join(kept)))


def read_options(encoded: bytes | str) -> TrainOptions:
    """Returns options from JSON; those that a file of an earlier rpfunc does not have yet are as by default.

    Raises msgspec.MsgspecError or ValueError.
    """
    return msgspec.json.decode(encoded, type=TrainOptions)
