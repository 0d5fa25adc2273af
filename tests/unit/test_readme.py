"""What README shows works as it stands there."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_example(index, tmp_path):
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[index]
    assert len([line for line in example.splitlines() if line]) <= 22
    program = tmp_path / "example.py"
    program.write_text(example)
    runpy.run_path(str(program))


def test_the_schedule_example_draws_a_pipeline(tmp_path, capsys):
    run_example(2, tmp_path)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("worker 3 ")]


def test_a_model_of_transformers_comes_in_and_goes_out(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    monkeypatch.chdir(tmp_path)
    run_example(1, tmp_path)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config.vocab_size == 99


def test_the_library_example_runs_and_says_what_it_promises(tmp_path, capsys):
    run_example(0, tmp_path)
    loss, difference = re.search(r"loss (\S+), differs by (\S+);", (output := capsys.readouterr().out)).groups()
    assert 3 < float(loss) < 5
    assert abs(float(difference)) < 1e-12
    assert float(output.split()[-1]) < 1e-12
