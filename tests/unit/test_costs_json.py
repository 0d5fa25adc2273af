"""Layer costs in a file written by hand: every fault of every layer is named."""

import json

import pytest

from rpfunc.errors import PlanError
from rpfunc.plan import LayerCost, load_costs, save_costs

GOOD = {"forward": 1, "backward": 3, "fused": 3, "input_gradient": 2, "weight_gradient": 1}


def refused(path, layers):
    path.write_text(layers if isinstance(layers, str) else json.dumps(layers))
    with pytest.raises(PlanError) as caught:
        load_costs(path)
    return str(caught.value).removeprefix(f"costs in {path}: ")


def test_whole_numbers_come_back_as_floats(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps([GOOD]))
    (found,) = load_costs(path)
    assert found == LayerCost.of_forward(1.0)
    assert all(type(number) is float for number in vars(found).values())
    save_costs(path, [found])
    assert load_costs(path) == [found]


def test_what_is_no_number_is_named_in_every_layer(tmp_path):
    assert refused(tmp_path / "costs.json", [{**GOOD, "forward": "a"}, {**GOOD, "backward": "b", "fused": True}]) == (
        "3 problems\n"
        "  - layer 0 has forward 'a'; needs a list of layers, each an object of numbers\n"
        "  - layer 1 has backward 'b'; needs a list of layers, each an object of numbers\n"
        "  - layer 1 has fused True; needs a list of layers, each an object of numbers"
    )


def test_every_kind_of_fault_is_named_at_once(tmp_path):
    layers = [
        7,
        {"forwrad": 1, "backward": None, "fused": -1, "input_gradient": 2, "output_bytes": 10**400},
        GOOD,
        [],
        {**GOOD, "forward": 1e200},
    ]
    assert refused(tmp_path / "costs.json", layers) == (
        "9 problems\n"
        "  - layer 0 is 7; needs a list of layers, each an object of numbers\n"
        "  - layer 1 has the unknown field 'forwrad'\n"
        "  - layer 1 lacks 'forward'\n"
        "  - layer 1 lacks 'weight_gradient'\n"
        "  - layer 1 has backward None; needs a list of layers, each an object of numbers\n"
        "  - layer 1: fused is -1.0, it must be at least 0 and finite\n"
        f"  - layer 1: output_bytes is {10**59}, "
        "it must be 0 or from 1e-100 to 1e+100\n"
        "  - layer 3 is []; needs a list of layers, each an object of numbers\n"
        "  - layer 4: forward is 1e+200, it must be 0 or from 1e-100 to 1e+100"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"layers": []}', "is {'layers': []}; needs a list of layers, each an object of numbers"),
        ("null", "is None; needs a list of layers, each an object of numbers"),
        ("[", "Input data was truncated; needs a list of layers, each an object of numbers"),
    ],
)
def test_what_is_no_list_is_refused(tmp_path, text, message):
    assert refused(tmp_path / "costs.json", text) == message
