"""docs/architecture.md says who may know of threads: read from the source, file by file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {str(path.relative_to(ROOT)): path for folder in ("rpfunc", "models") for path in (ROOT / folder).rglob("*.py")}
MAY_RUN = ("rpfunc/runtime/", "rpfunc/train/", "rpfunc/cli/", "rpfunc/testing/", "rpfunc/__init__.py")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("name", sorted(FILES))
def test_who_imports_the_runtime_and_who_starts_threads(name):
    path = FILES[name]
    if not name.startswith(MAY_RUN):
        assert [found for found in imported(path) if found.startswith("rpfunc.runtime")] == []
    if not name.startswith("rpfunc/runtime/"):
        assert "threading.Thread(" not in path.read_text()
        assert [found for found in imported(path) if "ThreadPool" in found or "multiprocessing" in found] == []


def test_the_rule_can_be_broken():
    assert any(found.startswith("rpfunc.runtime") for found in imported(ROOT / "rpfunc/train/steps.py"))
    assert "threading.Thread(" in (ROOT / "rpfunc/runtime/workers.py").read_text()
