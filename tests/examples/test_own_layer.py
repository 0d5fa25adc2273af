"""The example of a layer of one's own runs as written, and shows what it says."""

import runpy
from pathlib import Path

import torch

from rpfunc import Batch

PATH = Path(__file__).parents[2] / "examples" / "own_layer.py"


def test_the_example_proves_its_layer_and_refuses_the_wrong_ones(capfd):
    runpy.run_path(str(PATH), run_name="__main__")
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("fading         exact: ")
    assert lines[1].startswith("looking_ahead  refused: recurrent layer: output row 0 depends on input row 1 (x)")
    assert lines[2].startswith(
        "forgetting     refused: recurrent layer, layer by layer, 2 rows at a time: output row 2"
    )
    plain, *streamed = [float(line.split("MiB")[0].split()[-1]) for line in lines if "MiB" in line]
    assert len(streamed) == 2
    assert max(streamed) < plain / 8
    assert all(float(line.split()[-1]) < 1e-10 for line in lines[-2:])


def test_the_examples_layer_is_its_formula():
    example = runpy.run_path(str(PATH))
    width, num_rows = example["WIDTH"], 7
    p = {name: example["draw"](name, width, width) for name in ("query", "key", "value")}
    p["gate"] = example["draw"]("gate", width)
    x, state = example["draw"]("x", 2, num_rows, width), example["draw"]("state", 2, width, width)
    y, after = example["fading"](p, x, state, Batch(row={"x": x}))
    for t in range(num_rows):
        row = x[:, t]
        written = torch.einsum("bi,bj->bij", row @ p["key"], row @ p["value"])
        state = torch.sigmoid(row @ p["gate"])[:, None, None] * state + written
        torch.testing.assert_close(y[:, t], row + torch.einsum("bi,bij->bj", row @ p["query"], state))
    torch.testing.assert_close(after, state)
