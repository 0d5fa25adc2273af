"""What a command checks before it computes anything: the files that it will write, and its numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path

from rpfunc.checks import shown
from rpfunc.errors import OptionsError

LARGEST = 2**63 - 1
"""The largest whole number of an option: what 64 bits hold."""

PICTURES = (".png", ".svg")


def check_outputs(files: Mapping[str, tuple[Path | None, Sequence[str]]]) -> None:
    """Raises OptionsError listing every file that could not be written, and why.

    files  by the name of the option: the path that was given, or None, and the suffixes that it may have; the command
           adds the first one to a path without
    """
    problems = [
        f"{option}: {problem}"
        for option, (path, suffixes) in files.items()
        if path is not None
        for problem in _output_problems(path, suffixes)
    ]
    if problems:
        raise OptionsError.listing("output", problems)


def check_numbers(options: object, prefix: str = "") -> None:
    """Raises OptionsError listing every whole number in a dataclass of options that 64 bits do not hold."""
    problems = [
        f"{name} is {shown(number)}, it must be from {-LARGEST} to {LARGEST}"
        for name, number in _whole_numbers(options, prefix)
        if abs(number) > LARGEST
    ]
    if problems:
        raise OptionsError.listing("options", problems)


def _output_problems(path: Path, suffixes: Sequence[str]) -> Iterator[str]:
    if not path.name or path.is_dir():
        yield f"'{path}' is a folder, it must be a file, as in '{path / ('timeline' + suffixes[0])}'"
        return
    if path.suffix not in ("", *suffixes):
        yield f"'{path}' must end with {' or '.join(suffixes)}"
    if path.suffix in PICTURES and find_spec("matplotlib") is None:
        yield "matplotlib is not installed, which draws it (pip install 'rpfunc[plot]')"
    target = path if path.suffix else path.with_suffix(suffixes[0])
    if not path.parent.is_dir():
        yield f"there is no folder '{path.parent}' for '{path.name}'"
    elif not os.access(target if target.exists() else path.parent, os.W_OK):
        yield f"'{target}' may not be written"


def _whole_numbers(options: object, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(options, int):
        yield prefix, options
    elif is_dataclass(options):
        for field in fields(options):
            yield from _whole_numbers(getattr(options, field.name), f"{prefix}.{field.name}" if prefix else field.name)
