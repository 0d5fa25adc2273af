"""Files that are whole at any time: written beside their place, brought to the disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, fill: Callable[[Path], object]) -> None:
    """Calls `fill` with a path beside `path`, and gives the file it writes there this one's name.

    Whenever the process is killed, `path` is the whole new file or what it was before. Readable by all.
    Raises what `fill` raises, and OSError that names `path`; then nothing is left beside it.
    """
    beside = path.with_name(f"{path.stem}.partial{path.suffix}")  # some writers go by the suffix
    try:
        fill(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.chmod(0o644)
        beside.replace(path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError) and error.filename in (None, os.fspath(beside)):
            error.filename = os.fspath(path)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself
    finally:
        os.close(folder)
