"""Plans as JSON, both ways, and every fault of a file written by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Plan
from rpfunc.errors import PlanError
from rpfunc.plan import plan_from_json, plan_to_json
from rpfunc.testing import strategies


@given(st.data(), st.integers(1, 12), st.booleans())
def test_a_plan_comes_back(data, num_layers, symmetric):
    plan = data.draw(strategies.plans(num_layers))
    if symmetric:
        plan = Plan.symmetric(num_layers, [0, *range(1, num_layers, 2)])
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan_from_json(json.dumps(json.loads(plan_to_json(plan)), indent=2).encode()) == plan


def test_a_plan_that_is_not_trained_has_no_backward():
    assert plan_from_json('{"forward": [[0, 2], [2, 4]]}') == Plan.parse("F0:2 F2:4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan: is no JSON: Input data was truncated"),
        ("[" * 100_000, "plan: is no JSON: maximum recursion depth exceeded while deserializing an object"),
        (
            '{"forward": [[0, 1000000000]]}',
            "plan: forward 0 is [0, 1000000000], it must be a pair of layers, start and stop, as in [0, 6]",
        ),
        ("[1]", "plan: is a JSON list, needs an object with forward, fused, backward"),
        ("{}", "plan: has no forward and no fused stage, needs one"),
        (
            '{"forward": [[0, 2], [2], [3, 3]], "fused": 7, "backward": {"0": 2}, "stages": 1}',
            "plan: 5 problems\n"
            "  - has the unknown field 'stages', there are forward, fused, backward\n"
            "  - forward 1 is [2], it must be a pair of layers, start and stop, as in [0, 6]\n"
            "  - forward 2 is [3, 3], it must be a pair of layers, start and stop, as in [0, 6]\n"
            "  - backward is {'0': 2}, it must be a list of pairs of layers\n"
            "  - fused is 7, it must be a pair of layers, start and stop, as in [0, 6]",
        ),
        (
            '{"forward": [[0, 2]], "fused": [2.0, true]}',
            "plan: fused is [2.0, True], it must be a pair of layers, start and stop, as in [0, 6]",
        ),
        (
            '{"forward": [[0, 2], [3, 4]], "fused": [4, 6], "backward": [[0, 3], [2, 4]]}',
            "plan 'F0:2 F3:4 X4:6 B0:3 B2:4': 2 problems\n"
            "  - forward leaves out layers 2:3 before 3:4\n"
            "  - backward repeats layers 2:3 before 2:4",
        ),
        (
            '{"forward": [[0, 3]], "fused": [3, 5], "backward": [[0, 2], [1, 3]], "foo": 1}',
            "plan 'F0:3 X3:5 B0:2 B1:3': 2 problems\n"
            "  - has the unknown field 'foo', there are forward, fused, backward\n"
            "  - backward repeats layers 1:2 before 1:3",
        ),
        (
            '{"forward": [[0, 2], [3]], "fused": [4, 6], "backward": [[0, 3], [2, 4]], "foo": 1}',
            "plan: 3 problems\n"
            "  - has the unknown field 'foo', there are forward, fused, backward\n"
            "  - forward 1 is [3], it must be a pair of layers, start and stop, as in [0, 6]\n"
            "  - backward repeats layers 2:3 before 2:4",
        ),
        (
            '{"forward": [[0, 1], [2, 3]], "fused": "last", "backward": [[1, 4]]}',
            "plan: 3 problems\n"
            "  - fused is 'last', it must be a pair of layers, start and stop, as in [0, 6]\n"
            "  - forward leaves out layers 1:2 before 2:3\n"
            "  - backward leaves out layers 0:1 before 1:4",
        ),
        (
            '{"forward": [[0, 4]], "fused": [4, 6]}',
            "plan 'F0:4 X4:6': backward leaves out layers 0:4 before 4:6",
        ),
    ],
)
def test_every_fault_is_named(text, message):
    with pytest.raises(PlanError) as caught:
        plan_from_json(text)
    assert str(caught.value) == message
