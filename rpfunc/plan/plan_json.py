"""Plans as JSON."""

from __future__ import annotations

from typing import Any

from rpfunc.errors import PlanError
from rpfunc.plan.plan import Plan, Span, span_faults

FIELDS = ("forward", "fused", "backward")


def plan_to_json(plan: Plan) -> str:
    """Returns a plan as a JSON object of its fields, each span a pair of layers, half open.

    >>> plan_to_json(Plan.parse("F0:6 X6:8 B0:2 B2:6"))
    '{"forward":[[0,6]],"fused":[6,8],"backward":[[0,2],[2,6]]}'
    """
    import msgspec  # here, since it takes a while and few runs read or write plans

    return msgspec.json.encode({name: getattr(plan, name) for name in FIELDS}).decode()


def plan_from_json(text: str | bytes) -> Plan:
    """Returns the plan that `plan_to_json` wrote, or somebody by hand; what is left out is empty.

    Raises PlanError for what is no JSON object, and listing every unknown field, every span that is none, and, of those
    that are, every layer that a direction misses or repeats (`Plan.faults`; a plan without backward stages is not
    trained).

    >>> print(plan_from_json('{"forward": [[0, 6]], "fused": [6, 8], "backward": [[0, 2], [2, 6]]}'))
    F0:6 X6:8 B0:2 B2:6
    """
    import msgspec

    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"plan: is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise PlanError(f"plan: is a JSON {type(fields).__name__}, needs an object with {', '.join(FIELDS)}")
    problems = [
        f"has the unknown field {name!r:.40}, there are {', '.join(FIELDS)}" for name in fields if name not in FIELDS
    ]
    wrong = []
    spans: dict[str, tuple[Span, ...]] = {}
    for name in ("forward", "backward"):
        entries = fields.get(name, [])
        if isinstance(entries, list):
            wrong += [_problem(f"{name} {place}", entry) for place, entry in enumerate(entries) if not _is(entry)]
            spans[name] = tuple(Span(*entry) for entry in entries if _is(entry))
        else:
            wrong.append(f"{name} is {entries!r:.40}, it must be a list of pairs of layers")
    fused = fields.get("fused")
    if fused is not None and not _is(fused):
        wrong.append(_problem("fused", fused))
    if not wrong and not spans["forward"] and fused is None:
        wrong.append("has no forward and no fused stage, needs one")
    if wrong:  # beside a span that is none nothing can be said, but where all of a direction are spans
        turn = (Span(*fused),) if fused is not None and _is(fused) else ()
        for name, found in spans.items():
            if found and len(found) == len(fields[name]):
                wrong += span_faults(name, found + turn)
        raise PlanError.listing("plan", problems + wrong)
    plan = Plan(spans["forward"], None if fused is None else Span(*fused), spans["backward"])
    problems += plan.faults(plan.num_layers, trained=bool(plan.fused or plan.backward))
    if problems:
        raise PlanError.listing(f"plan '{plan}'", problems)
    return plan


def _is(entry: Any) -> bool:
    """Returns whether an entry is a span that is not empty, of layers as `Plan.parse` has them."""
    return isinstance(entry, list) and list(map(type, entry)) == [int, int] and 0 <= entry[0] < entry[1] < 10**9


def _problem(name: str, entry: Any) -> str:
    return f"{name} is {entry!r:.40}, it must be a pair of layers, start and stop, as in [0, 6]"
