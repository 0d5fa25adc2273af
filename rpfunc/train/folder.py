"""The folder of a run: its options, metrics and checkpoint, each written so that a killed process loses little."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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

    @contextmanager
    def begin(self, options: TrainOptions) -> Iterator[None]:
        """Makes the folder, with the options in it, for a run within the `with` block.

        If the block fails before a first step is recorded, all that the run has made is removed, so that the same
        command can be tried again; what others have put there stays. Raises OptionsError if the folder exists:
        nothing is ever overwritten.
        """
        try:
            absent = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True)
        except OSError as error:
            hint = f"give another --out, or continue it with --resume {self.path}"
            raise OptionsError(f"out: cannot make {self.path}: {error.strerror}; {hint}") from error
        try:
            self.options.write_bytes(msgspec.json.format(msgspec.json.encode(options), indent=2))
            yield
        except BaseException:
            if not self._has_steps():
                for file in (self.options, self.metrics, self.checkpoint):
                    with suppress(OSError):
                        file.unlink()
                with suppress(OSError):  # up to the first that is not empty
                    for made in absent:
                        made.rmdir()
            raise

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

    def _has_steps(self) -> bool:
        try:
            return any(record["step"] > 0 for record in self.records())
        except (OSError, OptionsError):
            return True  # nobody knows: better kept

    def rewind(self, step: int) -> None:
        """Drops the metrics of steps after `step`: a resumed run does those again."""
        kept = [json.dumps(record) + "\n" for record in self.records() if record["step"] <= step]
        replace_file(self.metrics, lambda beside: beside.write_text("".join(kept)))


def read_options(encoded: bytes | str) -> TrainOptions:
    """Returns options from JSON; those that a file of an earlier rpfunc does not have yet are as by default.

    Raises msgspec.MsgspecError or ValueError.
    """
    return msgspec.json.decode(encoded, type=TrainOptions)
