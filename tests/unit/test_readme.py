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
    run_example(3, tmp_path)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("worker 3 ")]


def test_a_model_of_transformers_comes_in_and_goes_out(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    monkeypatch.chdir(tmp_path)
    run_example(2, tmp_path)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config.vocab_size == 99


def test_the_steps_example_learns(tmp_path, capsys):
    run_example(1, tmp_path)
    steps, losses, norms = zip(*map(str.split, capsys.readouterr().out.splitlines()), strict=True)
    assert list(map(int, steps)) == list(range(1, 21))
    assert 5 < float(losses[0]) < 6  # log(256) is 5.5
    assert float(losses[-1]) < 4
    assert all(0 < float(norm) < 100 for norm in norms)


def test_every_program_is_run_and_other_blocks_are_for_a_shell():
    """No test above may be of another block than it says, and no code is shown that nothing runs."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    programs = [text for language, text in blocks if language == "python"]
    for program, word in zip(programs, ("attending", "train_steps", "hf.load", "gantt"), strict=True):
        assert word in program
    assert [text for language, text in blocks if not language and re.search("import | = ", text)] == []


def test_the_library_example_runs_and_says_what_it_promises(tmp_path, capsys):
    run_example(0, tmp_path)
    loss, difference = re.search(r"loss (\S+), differs by (\S+);", (output := capsys.readouterr().out)).groups()
    assert 3 < float(loss) < 5
    assert abs(float(difference)) < 1e-12
    assert float(output.split()[-1]) < 1e-12
