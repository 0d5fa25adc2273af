"""Prints what `hf.load` of a folder adds to this process's own (anonymous) memory, at most, in bytes. Linux only.

    .venv/bin/python benchmarks/import_memory.py FOLDER copied|mapped

Every page of the parameters is read. What modules take as they are imported is not counted.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from rpfunc import tree
from rpfunc.models import hf


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    folder, how = sys.argv[1:]
    found, ended = [own_bytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            found.append(own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, params = hf.load(folder, mapped=how == "mapped")
    for leaf in tree.leaves(params):
        leaf.sum()
    found.append(own_bytes())
    ended.set()
    watcher.join()
    print(max(found) - found[0])


if __name__ == "__main__":
    main()
