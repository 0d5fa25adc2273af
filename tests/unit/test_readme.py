"""What README shows works as it stands there."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_library_example_runs_and_says_what_it_promises(tmp_path, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 22
    program = tmp_path / "example.py"
    program.write_text(example)
    runpy.run_path(str(program))
    loss, difference = re.search(r"loss (\S+), differs by (\S+);", (output := capsys.readouterr().out)).groups()
    assert 3 < float(loss) < 5
    assert abs(float(difference)) < 1e-12
    assert float(output.split()[-1]) < 1e-12
