"""Layer costs as JSON: to a file and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from rpfunc.checks import MOST, size_problems
from rpfunc.errors import PlanError
from rpfunc.files import replace_file
from rpfunc.plan.costs import LayerCost

NEEDED = "needs a list of layers, each an object of numbers"


def save_costs(path: str | Path, costs: Sequence[LayerCost]) -> None:
    """Writes layer costs as JSON: a list of objects with the fields of `LayerCost`. Written beside, then renamed."""
    import msgspec  # here, since it takes a while and few runs read or write costs

    text = msgspec.json.format(msgspec.json.encode([asdict(cost) for cost in costs])) + b"\n"
    replace_file(Path(path), lambda beside: beside.write_bytes(text))


def load_costs(path: str | Path) -> list[LayerCost]:
    """Returns what `save_costs` wrote, or somebody by hand; sizes may be left out.

    Raises PlanError for a file that cannot be read or is no list, and listing every layer's faults: what is no object,
    unknown and missing fields, and fields that are no number or one that means nothing.
    """
    import msgspec

    subject = f"costs in {path}"
    try:
        layers = msgspec.json.decode(Path(path).read_bytes())
    except OSError as error:
        raise PlanError(f"{subject}: cannot read it: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no JSON, not UTF-8, or nested without end
        raise PlanError(f"{subject}: {error}; {NEEDED}") from error
    if not isinstance(layers, list):
        raise PlanError(f"{subject}: is {layers!r:.40}; {NEEDED}")
    problems = [f"layer {index}{problem}" for index, layer in enumerate(layers) for problem in _problems(layer)]
    if problems:
        raise PlanError.listing(subject, problems)
    return [LayerCost(**{name: float(number) for name, number in layer.items()}) for layer in layers]


def _problems(layer: Any) -> list[str]:
    """Returns, as ends of sentences, what is wrong with the JSON of a layer."""
    if not isinstance(layer, dict):
        return [f" is {layer!r:.40}; {NEEDED}"]
    known = {field.name: field.default is MISSING for field in fields(LayerCost)}
    unknown = sorted(layer.keys() - known.keys())
    missing = [name for name, needed in known.items() if needed and name not in layer]
    problems = [f"has the unknown field {name!r:.40}" for name in unknown] + [f"lacks {name!r}" for name in missing]
    given = {name: layer[name] for name in known if name in layer}
    numbers = {name: value for name, value in given.items() if type(value) in (int, float)}
    problems += [f"has {name} {value!r:.40}; {NEEDED}" for name, value in given.items() if name not in numbers]
    # as floats, which all but absurd whole numbers can be
    sizes = {name: float(value) if abs(value) < MOST else value for name, value in numbers.items()}
    return [f" {problem}" for problem in problems] + [f": {problem}" for problem in size_problems(sizes)]
