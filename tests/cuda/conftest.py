"""Without a GPU all of these are skipped, and say so."""

import sys
from pathlib import Path

import pytest

from rpfunc.runtime.cuda import missing

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `offloading`


def pytest_collection_modifyitems(items):
    reason = missing()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(240))
            item.add_marker(pytest.mark.filterwarnings("default"))  # what torch says of the GPU is no fault of ours
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


def pytest_terminal_summary(terminalreporter):
    reason = missing()
    if reason is not None:
        terminalreporter.write_line(f"tests/cuda: SKIPPED, nothing was tested on a GPU: {reason}", yellow=True)
