"""Extras: those that texts and messages speak of exist, and each requirement has a pin that meets it."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def texts():
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile"))
    for folder in ("rpfunc", "models", "docs", "examples", "benchmarks", "tests"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".toml"))


def test_every_extra_that_is_spoken_of_exists():
    found = {
        (extra, str(path.relative_to(ROOT)))
        for path in texts()
        for names in re.findall(r"'(?:rpfunc|\.)\[([\w,]+)\]'", path.read_text())
        for extra in names.split(",")
    }
    assert [each for each in sorted(found) if each[0] not in EXTRAS] == []
    assert {extra for extra, _ in found} >= {"gguf", "hf", "peft", "plot"}


@pytest.mark.parametrize("extra", [None, *EXTRAS])
def test_every_requirement_has_a_pin_that_meets_it(extra):
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    needed = [Requirement(each) for each in (PROJECT["dependencies"] if extra is None else EXTRAS[extra])]
    assert needed
    assert [str(each) for each in needed if pins.get(each.name) not in each.specifier] == []


def test_a_gguf_file_needs_what_its_extra_brings():
    from rpfunc.models.hf.gguf import NEEDED

    for extra in ("gguf", "examples"):
        assert {Requirement(each).name for each in EXTRAS[extra]} >= {*NEEDED}
